"""The limit on requests in flight: whom it lets through and when, and how `auto` follows an engine's load, in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest
from slime_core.config.sections import EvalSection, RewardSection
from slime_core.config.settings import Settings
from slime_core.errors import EngineError
from slime_core.protocols import Completion, EngineLoad, SamplingParams
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.admission import Bounded
from slime_core.rollout.concurrency import AdaptiveLimit, ConcurrencyLimit
from slime_core.run.evaluation import evaluate_groups
from slime_core.rundir.events import EventLog, read_events
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Sample, Status

from .cached_engine import CachedEngine
from .timed_prompts import Prompts, accounted, drive, lengths

#: What an engine says, and what comes of it: answers so far, whether requests waited, usage, running, queued, retractions;
#: then the limit, and why it changed. A round is as many answers as the limit.
STORY = [
    (0, True, 0.0, 0, 0, 0, 32, None),
    (31, True, 0.2, 32, 0, 0, 32, None),  # one answer before the end of the round
    (32, True, 0.2, 32, 0, 0, 64, "room"),  # twice as many
    (95, True, 0.2, 64, 0, 0, 64, None),
    (96, False, 0.2, 40, 0, 0, 64, None),  # nobody waits for more
    (96, True, 0.5, 64, 0, 0, 108, "room"),  # 64 x 0.85 / 0.5: twice as many would not have room
    (204, True, 0.9, 108, 0, 0, 108, None),  # between 0.85 and 0.95
    (210, True, 0.96, 108, 0, 0, 106, "full"),  # 108 x 0.95 / 0.96
    (236, True, 1.0, 106, 0, 3, 106, None),  # 27 answers, a quarter of 108, are not over
    (237, True, 0.97, 106, 0, 3, 103, "full"),  # 106 x 0.95 / 0.97; the 3 were before
    (263, True, 0.97, 100, 0, 4, 77, "retracted"),  # 103 x 0.75
    (288, True, 0.3, 37, 40, 4, 77, None),  # 40 queue, and at the last reading none did
    (300, True, 0.3, 38, 40, 4, 77, None),  # it is still taking more
    (305, True, 0.0, 0, 78, 4, 77, None),  # it is paused
    (310, True, 0.3, 38, 40, 4, 77, None),  # it goes on
    (315, True, 0.3, 38, 40, 4, 57, "queued"),  # 37 would be without them: at most a quarter goes
    (334, True, 0.3, 52, 5, 4, 57, None),  # 19 were answered: 5 do not wait long
    (335, True, 0.3, 52, 5, 4, 57, None),  # 1 was, and one of 16 may have just come: 5 are more
    (336, True, 0.3, 52, 5, 4, 52, "queued"),  # without the 5
    (350, True, 0.3, 49, 3, 4, 52, None),  # the round is not over
    (388, True, 0.3, 49, 3, 4, 55, "room"),  # a sixteenth of 52 more
    (500, True, 0.3, 40, 60, 4, 58, "room"),  # 60 queue, and 112 were answered: responses are short
]


def test_the_limit_follows_the_load_as_worked_out_by_hand():
    limit = AdaptiveLimit()
    for answers, waited, usage, running, queued, retractions, wanted, why in STORY:
        load = EngineLoad(kv_cache_usage=usage, running=running, queued=queued, retractions=retractions)
        found = limit.follow(load, answers=answers, waited=waited)
        assert (answers, limit.limit, found) == (answers, wanted, why)


def test_it_begins_with_as_many_for_each_server():
    limit = AdaptiveLimit()
    assert limit.follow(EngineLoad(replicas=5), answers=0, waited=False) == "start"
    assert limit.limit == 5 * 32


def test_it_never_falls_below_one():
    limit, queue = AdaptiveLimit(), EngineLoad(kv_cache_usage=1.0, running=1, queued=90)
    for answers in range(200):
        limit.follow(queue, answers=answers, waited=True)
    assert limit.limit == 1


def params(seed):
    return SamplingParams(max_new_tokens=10**6, seed=seed)


def generating(limit, n, engine, *, path=None):
    """Ask for `n` responses at once; returns the answers and the virtual seconds that they took. Events go to `path`."""

    async def work():
        events = EventLog(path)
        events.start(1)
        limited = AbortableEngine(engine, ConcurrencyLimit(limit, engine, events))
        answers = await asyncio.gather(*(limited.generate([0], params(seed)) for seed in range(n)))
        events.close()
        return answers

    return run_in_virtual_time(work())


def uniform(seed):
    return random.Random(seed).randint(50, 150)


def test_auto_settles_where_the_cache_is_nearly_full(tmp_path):
    """A request has 10 tokens of prompt and 50 of response at an average moment: 6000 tokens hold 100 of them."""
    engines, path = [CachedEngine(6000, 10, uniform) for _ in range(2)], tmp_path / "events.jsonl"
    followed, took = generating("auto", 3000, engines[0], path=path)
    _, took_all = generating(None, 3000, engines[1])
    assert [len(answer.tokens) for answer in followed] == [uniform(seed) for seed in range(3000)]
    changes = [event for event in read_events(path) if event["name"] == "concurrency_changed"]
    assert [event["before"] for event in changes[1:]] == [event["limit"] for event in changes[:-1]]
    first = next(number for number, event in enumerate(changes) if event["reason"] != "room")
    assert [event["limit"] for event in changes[:first]] == sorted(
        event["limit"] for event in changes[:first]
    )
    settled = [event["limit"] for event in changes[first:]]
    assert min(settled) >= 60
    assert max(settled) <= 110
    assert engines[0].wasted < 0.1 * engines[1].wasted
    assert took < 1.25 * took_all


def test_auto_is_not_held_up_by_an_engine_whose_requests_are_few():
    """Three requests fill the cache: however often the limit falls, every one is answered."""
    answers, _ = generating("auto", 60, CachedEngine(400, 10, uniform))
    assert [len(answer.tokens) for answer in answers] == [uniform(seed) for seed in range(60)]


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_fixed_limit_is_never_exceeded_and_always_used(limit):
    engine = CachedEngine(10**9, 10, lambda seed: 5)
    answers, took = generating(limit, 300, engine)
    assert {len(answer.tokens) for answer in answers} == {5}
    assert (engine.most, took) == (limit, 5 * -(-300 // limit))


def test_an_engine_without_a_limit_is_not_asked_for_its_load():
    engine = CachedEngine(10**9, 10, lambda seed: 5)
    generating(None, 40, engine)
    assert (engine.most, engine.readings) == (40, 0)


def test_the_load_is_read_once_a_second_while_a_request_is_in_flight():
    engine = CachedEngine(10**9, 10, lambda seed: 5)

    async def work():
        limited = AbortableEngine(engine, ConcurrencyLimit("auto", engine, EventLog()))
        for _ in range(2):
            await limited.generate([0], params(0))
            await asyncio.sleep(100)

    run_in_virtual_time(work())
    assert 2 * 5 <= engine.readings <= 2 * 6  # which of two things at one moment comes first does not matter


#: Seed of a request that fails.
FAILS = 999


class ByOrder:
    """Answers each request after a second, and remembers in which order they came, and how many at once."""

    capabilities = CachedEngine.capabilities

    def __init__(self, limit):
        self.seen, self.now, self.most, self.aborts = [], 0, 0, 0
        self.limit = ConcurrencyLimit(limit, self, EventLog())

    async def generate(self, tokens, params, *, session_id=None):
        self.seen.append(params.seed)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(1)
            if params.seed == FAILS:
                raise EngineError("that one")
        finally:
            self.now -= 1
        return Completion(tokens=[1], log_probs=[-1.0], finish_reason="stop", weight_version="0")

    async def abort(self):
        self.aborts += 1

    async def current_load(self):
        return EngineLoad(running=self.now)


def test_first_come_first_served():
    async def work():
        engine = ByOrder(3)
        one, other = AbortableEngine(engine, engine.limit), AbortableEngine(engine, engine.limit)
        await asyncio.gather(*((one, other)[seed % 2].generate([0], params(seed)) for seed in range(12)))
        return engine.seen, engine.most

    assert run_in_virtual_time(work())[0] == (list(range(12)), 3)


def test_an_abort_answers_those_that_wait_at_once_and_no_others():
    async def work():
        engine = ByOrder(2)
        one, other = AbortableEngine(engine, engine.limit), AbortableEngine(engine, engine.limit)
        asked = [asyncio.create_task((one, other)[seed % 2].generate([0], params(seed))) for seed in range(8)]
        await asyncio.sleep(0.5)
        await one.abort()
        await asyncio.sleep(0)
        done = [seed for seed, task in enumerate(asked) if task.done()]
        reasons = [answer.finish_reason for answer in await asyncio.gather(*asked)]
        later = await one.generate([0], params(8))
        return done, reasons, later.finish_reason, engine.seen, engine.limit.in_flight

    done, reasons, later, seen, in_flight = run_in_virtual_time(work())[0]
    assert done == [2, 4, 6]
    assert reasons == ["stop", "stop", "abort", "stop", "abort", "stop", "abort", "stop"]
    assert (later, seen, in_flight) == ("abort", [0, 1, 3, 5, 7], 0)


def test_a_request_that_was_let_through_just_before_an_abort_is_not_sent():
    async def work():
        engine = ByOrder(1)
        one = AbortableEngine(engine, engine.limit)
        await engine.limit.enter("somebody")
        asked = asyncio.create_task(one.generate([0], params(0)))
        await asyncio.sleep(0)
        engine.limit.leave(answered=True)  # its turn, which it learns of at the next one of the loop
        await one.abort()
        return (await asked).finish_reason, engine.seen, engine.limit.in_flight

    assert run_in_virtual_time(work())[0] == ("abort", [], 0)


@pytest.mark.parametrize("is_let_through", [False, True])
def test_a_request_that_is_cancelled_leaves_its_place(is_let_through):
    async def work():
        engine = ByOrder(1)
        one = AbortableEngine(engine, engine.limit)
        await engine.limit.enter("somebody")
        asked = [asyncio.create_task(one.generate([0], params(seed))) for seed in range(2)]
        await asyncio.sleep(0)
        if is_let_through:
            engine.limit.leave(answered=True)
        asked[0].cancel()
        await asyncio.sleep(0)
        if not is_let_through:
            engine.limit.leave(answered=True)
        answer = await asked[1]
        return asked[0].cancelled(), answer.finish_reason, engine.seen, engine.limit.in_flight

    assert run_in_virtual_time(work())[0] == (True, "stop", [1], 0)


def test_an_abort_passes_over_a_request_that_was_cancelled_in_the_same_turn_of_the_loop():
    async def work():
        engine = ByOrder(1)
        one = AbortableEngine(engine, engine.limit)
        await engine.limit.enter("somebody")
        asked = [asyncio.create_task(one.generate([0], params(seed))) for seed in range(2)]
        await asyncio.sleep(0)
        asked[0].cancel()
        await one.abort()
        cancelled, aborted = await asyncio.gather(*asked, return_exceptions=True)
        return type(cancelled), aborted.finish_reason, engine.limit.in_flight

    assert run_in_virtual_time(work())[0] == (asyncio.CancelledError, "abort", 1)


def test_a_request_that_fails_leaves_its_place():
    async def work():
        engine = ByOrder(1)
        one = AbortableEngine(engine, engine.limit)
        asked = (one.generate([0], params(seed)) for seed in (FAILS, 0))
        return await asyncio.gather(*asked, return_exceptions=True), engine.limit.in_flight

    (failed, answered), in_flight = run_in_virtual_time(work())[0]
    assert isinstance(failed, EngineError)
    assert (answered.finish_reason, in_flight) == ("stop", 0)


def test_a_conversation_holds_no_place_between_its_turns():
    """Two of three turns with tool calls of 10 seconds between them, beside 20 requests, all of a second, and one place.

    The first turns and the 20 take 22 seconds, the second turns, which were asked for meanwhile, 2; the later of them is
    followed by a tool call and a turn.
    """

    async def work():
        engine = ByOrder(1)
        one = AbortableEngine(engine, engine.limit)

        async def conversation(seed):
            for turn in range(3):
                if turn:
                    await asyncio.sleep(10)
                await one.generate([0], params(seed + turn))

        others = (one.generate([0], params(seed)) for seed in range(20))
        await asyncio.gather(conversation(100), conversation(200), *others)
        return engine.most

    most, took = run_in_virtual_time(work())
    assert (most, took) == (1, 22 + 2 + 10 + 1)


class Troubled(CachedEngine):
    """Its load cannot be read."""

    def __init__(self, error):
        super().__init__(10**6, 1, lambda seed: 5)
        self.error = error

    async def current_load(self):
        raise self.error


def test_a_load_that_cannot_be_read_leaves_the_limit_and_is_told_once(caplog):
    answers, took = generating("auto", 128, Troubled(EngineError("no answer")))
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert took == 5 * 4
    assert caplog.text.count("the engine does not tell its load, so the limit stays: no answer") == 1


def test_a_load_that_is_a_fault_of_the_plugin_ends_the_run():
    with pytest.raises(TypeError, match="of the plugin") as caught:
        generating("auto", 128, Troubled(TypeError("of the plugin")))
    assert caught.value.__notes__ == ["raised while the engine's load was read"]


@pytest.mark.parametrize("limit", [1, 3, "auto"])
@pytest.mark.parametrize("mode", [None, "continue"])
def test_interrupts_lose_nothing_and_the_bound_on_staleness_holds(mode, limit):
    section = {"rollout_concurrency": limit}
    prompts = Prompts(lambda seed: lengths(seed) % 40 + 1, section=section)
    admission = Bounded(max_staleness=2)
    (batches, ages, dispatcher), _ = run_in_virtual_time(drive(prompts, admission, steps=20, mode=mode))
    assert max(ages) <= 2
    assert batches == [list(range(first, first + 4)) for first in range(0, 80, 4)]
    assert set(accounted(prompts, batches, dispatcher).values()) == {1}
    assert prompts.concurrency.in_flight == 0


class HeldOut:
    """Six prompts."""

    def __len__(self):
        return 6

    def restore(self, state):
        pass

    def take(self, n):
        return [[Sample(index=i, tokens=[0], reward=0.0)] for i in range(n)]


def test_evaluations_share_the_limit():
    prompts = Prompts(lambda seed: 10, section={"rollout_concurrency": 2})
    sections = {"rollout": prompts.rollout, "reward": RewardSection(), "eval": EvalSection()}
    prompts.settings = Settings(sections, {}, {})
    evaluated = []
    work = evaluate_groups(prompts, HeldOut(), step=1, start={}, write=evaluated.extend)
    _, took = run_in_virtual_time(work)
    assert {group[0].status for group in evaluated} == {Status.COMPLETED}
    assert took == 10 * 6 / 2


def test_metrics_are_of_what_was_seen_since_the_last_call():
    engine = CachedEngine(1000, 10, lambda seed: 90)

    async def work():
        limit = ConcurrencyLimit(8, engine, EventLog())
        limited = AbortableEngine(engine, limit)
        first = asyncio.gather(*(limited.generate([0], params(seed)) for seed in range(20)))
        await asyncio.sleep(50.5)
        half = limit.take_metrics()
        await first
        return half, limit.take_metrics(), limit.take_metrics()

    half, whole, nothing = run_in_virtual_time(work())[0]
    assert half == {
        "rollout/concurrency": 8.0,
        "rollout/requests_in_flight": 8.0,
        "rollout/requests_waiting": 12.0,
        "engine/kv_cache_usage": pytest.approx(8 * (10 + 50) / 1000),
        "engine/requests_queued": 0.0,
        "engine/retractions": 0.0,
    }
    assert whole["engine/kv_cache_usage"] == pytest.approx(8 * (10 + 89) / 1000, abs=0.009)
    assert nothing == {"rollout/concurrency": 8.0, "engine/retractions": 0.0}
