"""One group: which samples a reward is asked about, what becomes of an execution that fails, and of a group that is surplus."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from slime_core.config.sections import RewardSection
from slime_core.config.settings import Settings
from slime_core.errors import RewardError
from slime_core.protocols.rollout import rendering_prompt
from slime_core.rewards.results import Reward
from slime_core.rollout.admission import Bounded, Waves
from slime_core.rollout.dispatcher import Dispatcher
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import failure_of, fresh, run_group, score
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Sample, Status
from slime_core.samples.copies import copied

from .timed_prompts import BATCH, Prompts


class Scored(Prompts):
    """Prompts whose responses are one token and take a second; notes about which samples a reward is asked, which gives 1."""

    def __init__(self, generate=single_turn, *, section=None, **reward):
        super().__init__(lambda seed: 1, section=section)
        self.generate, self.asked = generate, []
        self.settings = Settings({"rollout": self.rollout, "reward": RewardSection(**reward)}, {}, {})
        self.scorer = SimpleNamespace(asks=lambda sample: True, score=self.one, score_group=self.all)

    async def one(self, sample):
        self.asked.append(sample.index)
        return Reward(score=1.0, value=1.0, seconds=0.0)

    async def all(self, group):
        return [await self.one(sample) for sample in group]

    async def score(self, samples, *, evaluation):
        await score(samples, self.scorer, self.settings.reward, events=self.events, evaluation=evaluation)

    def group(self):
        """Return a generated and scored group of the samples 0 and 1."""
        given = [Sample(index=i, group_index=0, tokens=[0]) for i in range(2)]
        return run_in_virtual_time(run_group(self, given, params_of=self.sampling_params))[0]


async def first_fails(ctx, sample, params):
    if sample.index == 0:
        sample.status, sample.failure = Status.FAILED, "its program asked nothing"
        return sample
    return await single_turn(ctx, sample, params)


def test_a_sample_that_its_generator_says_has_failed_is_not_scored():
    run = Scored(first_fails)
    failed, other = run.group()
    assert run.asked == [1]
    assert (failed.status, failed.failure, failed.reward) == (
        Status.FAILED, "its program asked nothing", None,
    )  # fmt: skip
    assert other.reward == 1.0


def test_a_group_reward_is_not_asked_about_a_group_that_a_failed_sample_drops():
    run = Scored(first_fails, group_rm=True)
    assert [sample.reward for sample in run.group()] == [None, None]
    assert run.asked == []


async def first_asks_a_judge_that_is_gone(ctx, sample, params):
    if sample.index == 0:
        sample.tokens, sample.response_length = [0, 7], 1
        raise RewardError("no judge answers")
    return await single_turn(ctx, sample, params)


def test_a_reward_that_a_generator_cannot_have_fails_its_sample_where_errors_drop_a_group():
    failed, other = Scored(first_asks_a_judge_that_is_gone, on_reward_error="drop").group()
    assert (failed.status, failed.failure) == (Status.FAILED, "sample 0: no judge answers")
    assert (failed.tokens, failed.response_length) == ([0], 0)
    assert (other.status, other.reward) == (Status.COMPLETED, 1.0)


def test_a_reward_that_a_generator_cannot_have_ends_the_run_where_errors_stop_it():
    with pytest.raises(RewardError, match="no judge answers"):
        Scored(first_asks_a_judge_that_is_gone, on_reward_error="stop").group()


def test_a_group_of_a_checkpoint_whose_prompt_leaves_no_room_is_dropped_and_not_generated(caplog):
    """Its prompt has five tokens, and with the answer there may be four; those that are new have one."""

    class Bounded4(Scored):
        def drop_reason(self, group):
            return failure_of(group)

        def where(self, sample):
            return f"{sample.name} (row 9)"

    run = Bounded4(section={"rollout_max_context_len": 4})
    run.taken = 1
    long = Sample(index=0, group_index=0, tokens=[0, 1, 2, 3, 4])

    async def step():
        dispatcher = Dispatcher(run, last_step=1)
        dispatcher.admission = Bounded(max_staleness=1)
        dispatcher.restore({"groups": [{"version": 0, "finished": False, "samples": [long.to_dict()]}]})
        async with dispatcher.open():
            return await dispatcher.next(1)

    groups, _ = run_in_virtual_time(step())
    assert [group[0].index for group in groups] == [1, 2, 3, 4]
    assert (run.dropped, sorted(run.asked)) == ([0], [1, 2, 3, 4])
    assert (
        "sample 0 (row 9): its prompt of 5 tokens leaves no room in rollout_max_context_len, 4" in caplog.text
    )


async def two_steps_of_twice_as_many(run):
    """Take two waves of twice the batch; returns what the first one left."""
    dispatcher = Dispatcher(run, last_step=2)
    dispatcher.admission = Waves(wave=2 * BATCH)
    await dispatcher.next(1)
    left = [sample for group in run.buffer for sample in copied(group)]
    await dispatcher.next(2)
    return left


def test_a_surplus_group_that_was_scored_is_not_scored_again():
    run = Scored(section={"partial_rollout": True})
    left, _ = run_in_virtual_time(two_steps_of_twice_as_many(run))
    assert [(sample.index, sample.reward) for sample in left] == [(4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0)]
    assert sorted(run.asked) == [0, 1, 2, 3, 4, 5, 6, 7]


@rendering_prompt
async def writes_into_the_sample(ctx, sample, params):
    sample.tokens, sample.custom_rm_path = [5, 6], "math"
    sample.metadata["said"] = "something"
    await asyncio.sleep(1)
    sample.append_response([7], finish_reason="stop")
    return sample


def test_a_surplus_group_comes_back_as_it_was_submitted_whatever_its_generator_wrote():
    left, _ = run_in_virtual_time(two_steps_of_twice_as_many(Scored(writes_into_the_sample)))
    assert [sample.index for sample in left] == [4, 5, 6, 7]
    for sample in left:
        assert vars(sample) == vars(Sample(index=sample.index, group_index=sample.index, tokens=[0]))


def test_a_partial_response_that_begins_anew_was_begun_by_no_step():
    metadata = {"start_rollout_id": 0, "level": 3}
    partial = Sample(index=0, tokens=[0, 7], response_length=1, status=Status.ABORTED, metadata=metadata)
    (prompt,) = fresh([partial])
    assert (prompt.status, prompt.tokens, prompt.metadata) == (Status.PENDING, [0], {"level": 3})


async def asks_nothing(ctx, sample, params):
    """Work for 1,000 s without the engine, or until that is of no use; the samples of the first batch ask once."""
    if sample.index < BATCH:
        return await single_turn(ctx, sample, params)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ctx.over.wait(), 1000)
    sample.status = Status.ABORTED
    return sample


def test_generators_that_ask_nothing_hear_that_the_batch_is_full():
    run = Scored(asks_nothing)

    async def step():
        dispatcher = Dispatcher(run, last_step=1)
        dispatcher.admission = Waves(wave=2 * BATCH)
        await dispatcher.next(1)

    _, took = run_in_virtual_time(step())
    assert took == 1
    assert [group[0].index for group in run.buffer] == [4, 5, 6, 7]


def test_generators_that_ask_nothing_may_finish_where_requests_are_ended_for_new_weights():
    run = Scored(asks_nothing)

    async def update():
        dispatcher = Dispatcher(run, last_step=2)
        dispatcher.admission = Bounded(max_staleness=1)
        async with dispatcher.open():
            await dispatcher.next(1)
            async with dispatcher.interrupted():
                return asyncio.get_running_loop().time()

    assert run_in_virtual_time(update())[0] == 1000
