"""The dispatcher in virtual time: what is in flight when, how old samples get, and that no group is lost or used twice."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from slime_core.errors import DataError, DeadlineError, SampleError
from slime_core.rollout.admission import Bounded, Job, Jobs, Waves
from slime_core.rollout.dispatcher import Dispatcher
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import fail, failure_of
from slime_core.runtime.deadline import seconds_left, within
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Sample, Status

from .timed_prompts import BATCH, Prompts, accounted, drive, lengths


@asynccontextmanager
async def generating(prompts):
    """A dispatcher that fills the batch of the first step beside the block."""
    dispatcher = Dispatcher(prompts, last_step=2)
    dispatcher.admission = Bounded(max_staleness=1)
    async with dispatcher.open():
        filling = asyncio.ensure_future(dispatcher.next(1))
        try:
            yield dispatcher
        finally:
            filling.cancel()


@pytest.mark.parametrize("in_completion_order", [False, True])
@pytest.mark.parametrize("mode", [None, "continue"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_sample_is_older_than_the_bound_and_every_prompt_is_used_once(bound, mode, in_completion_order):
    prompts = Prompts(lengths, drops=lambda index: index % 3 == 0)
    admission = Bounded(max_staleness=bound, in_completion_order=in_completion_order)
    (batches, ages, dispatcher), _ = run_in_virtual_time(drive(prompts, admission, steps=60, mode=mode))
    assert len(batches) == 60
    assert max(ages) <= bound
    assert bound == 0 or max(ages) == bound
    assert set(accounted(prompts, batches, dispatcher)) == set(range(prompts.taken))
    assert set(accounted(prompts, batches, dispatcher).values()) == {1}
    assert {index for batch in batches for index in batch}.isdisjoint(range(0, 10**4, 3))


def test_a_group_that_is_scored_while_requests_are_ended_is_decided_on_and_not_generated_or_scored_again():
    """Responses take 1 s, rewards 7 s, and weights come after 5 s: each update meets the rewards of a batch. One in four fails."""
    scored = []

    class Scored(Prompts):
        async def score(self, samples, *, evaluation):
            await asyncio.sleep(7)
            for sample in samples:
                scored.append(sample.index)
                sample.reward = 0.0
                if sample.index % 4 == 1:
                    fail(sample, "the reward service is full")

        def drop_reason(self, group):
            return failure_of(group)

    prompts = Scored(lambda seed: 1)
    prompts.scorer = SimpleNamespace(asks=lambda sample: True)
    admission = Bounded(max_staleness=1, in_completion_order=True)
    driving = drive(prompts, admission, steps=8, mode="continue")
    (batches, _, dispatcher), _ = run_in_virtual_time(driving)
    assert prompts.dropped == [index for index in scored if index % 4 == 1]
    assert sorted(scored) == sorted(set(scored))
    assert set(accounted(prompts, batches, dispatcher).values()) == {1}


def test_a_generator_that_does_not_return_for_an_update_of_the_weights_is_ended_by_the_deadline():
    async def waits(ctx, sample, params):
        await asyncio.sleep(10**6)  # a tool without a timeout

    prompts = Prompts(lambda seed: 1, section={"rollout_timeout_s": 50})
    prompts.generate = waits

    async def update():
        async with generating(prompts) as dispatcher:
            await asyncio.sleep(1)
            async with dispatcher.interrupted():
                pass

    told = r"weights of step 0: ending what is in flight \(--rollout-timeout-s\): not done after 50 s"
    with pytest.raises(DeadlineError, match=told):
        run_in_virtual_time(update())


def test_a_state_of_a_group_in_flight_is_not_changed_by_a_generator_that_appends_in_place():
    half = asyncio.Event()

    async def appends(ctx, sample, params):
        sample.tokens += [1, 1]
        sample.rollout_log_probs, sample.loss_mask = [-1.0, -1.0], [1, 1]
        sample.response_length += 2
        half.set()
        await asyncio.sleep(1)
        sample.status = Status.COMPLETED
        return sample

    prompts = Prompts(lambda seed: 1)
    prompts.generate = appends

    async def snapshot():
        async with generating(prompts) as dispatcher:
            await half.wait()
            return dispatcher.snapshot()()

    state, _ = run_in_virtual_time(snapshot())
    (held,) = [group for group in state["groups"] if group["samples"][0]["index"] == 0]
    assert (held["samples"][0]["tokens"], held["samples"][0]["response_length"]) == ([0], 0)


def test_a_group_whose_filter_raises_is_in_the_states_after_it():
    """The run is told of it when it asks for the next step's groups: a checkpoint may be taken before."""

    def faulty(index):
        if index == 1:
            raise ValueError("no reward to compare")

    prompts = Prompts(lambda seed: 1, drops=faulty)

    async def snapshot():
        async with generating(prompts) as dispatcher:
            await asyncio.sleep(2)
            return dispatcher.snapshot()()

    state, _ = run_in_virtual_time(snapshot())
    held = {group["samples"][0]["index"]: group["finished"] for group in state["groups"]}
    assert set(held) == set(range(prompts.taken))
    assert (held[0], held[1]) == (True, False)


def test_a_young_group_that_is_done_first_leaves_older_ones_their_places():
    """Three groups under version 0 may be trained up to step 3, one a step: a younger one that is done first has to wait."""
    jobs = Jobs(batch_size=1, last_step=9, next_step=2, version=1)
    old = [Job(number=n, version=0, given=[], group=[]) for n in (1, 2)]
    young = Job(number=3, version=1, given=[], group=[])
    admission = Bounded(max_staleness=2, in_completion_order=True)
    jobs.undecided, jobs.kept = set(old), [young]
    assert admission.batch(jobs) is None
    jobs.undecided, jobs.kept = {old[1]}, [young, old[0]]
    assert admission.batch(jobs) == [old[0]]
    jobs.next_step, jobs.kept = 3, [young]
    assert admission.batch(jobs) is None
    jobs.undecided, jobs.next_step = set(), 4
    assert admission.batch(jobs) == [young]


@pytest.mark.parametrize("section", [{}, {"rollout_concurrency": 4}])
@pytest.mark.parametrize("in_completion_order", [False, True])
def test_groups_that_stay_in_flight_are_under_the_deadline_of_no_step(in_completion_order, section):
    """A step's rollout is part of one deadline, and groups that are begun meanwhile are for later steps, too."""
    left = []

    async def noting(ctx, sample, params):
        left.append(seconds_left())
        return await single_turn(ctx, sample, params)

    prompts = Prompts(lengths, drops=lambda index: index % 3 == 0, section=section)
    prompts.generate = noting

    async def steps():
        dispatcher = Dispatcher(prompts, last_step=30)
        dispatcher.admission = Bounded(max_staleness=8, in_completion_order=in_completion_order)
        async with dispatcher.open():
            dispatcher.weights_arrived(0)
            for step in range(1, 31):
                await within(450, f"step {step}", dispatcher.next(step), waits_for_others=True)
                dispatcher.arrived()
                prompts.engine.version = step
                dispatcher.weights_arrived(step)

    run_in_virtual_time(steps())
    assert len(left) > 30 * BATCH
    assert set(left) == {None}


def test_in_order_of_submission_the_batches_do_not_depend_on_who_finishes_first():
    expected = [list(range(first, first + BATCH)) for first in range(0, 40 * BATCH, BATCH)]
    for seconds in (lengths, lambda seed: 1, lambda seed: lengths(seed + 7)):
        admission = Bounded(max_staleness=2)
        (batches, _, _), _ = run_in_virtual_time(drive(Prompts(seconds), admission, steps=40))
        assert batches == expected


def test_the_further_ahead_the_sooner_it_is_done():
    took = {}
    for bound in (0, 1, 4):
        admission = Bounded(max_staleness=bound, in_completion_order=True)
        _, took[bound] = run_in_virtual_time(drive(Prompts(lengths), admission, steps=60))
    assert took[0] > 1.3 * took[1] > 1.5 * took[4]


def test_without_staleness_a_step_takes_its_longest_response_and_the_training():
    prompts = Prompts(lengths)
    _, took = run_in_virtual_time(drive(prompts, Bounded(max_staleness=0), steps=10))
    seconds = [lengths(prompts.sampling_params(Sample(index=i, tokens=[0])).seed) for i in range(40)]
    assert took == sum(max(seconds[first : first + BATCH]) for first in range(0, 40, BATCH)) + 10 * 5


def test_waves_without_a_filter_are_the_bound_of_zero():
    waves = run_in_virtual_time(drive(Prompts(lengths), Waves(wave=BATCH), steps=20))
    bounded = run_in_virtual_time(drive(Prompts(lengths), Bounded(max_staleness=0), steps=20))
    assert waves[0][0] == bounded[0][0]
    assert waves[1] == bounded[1]


def test_what_has_become_too_old_is_dropped_where_the_policy_says_so():
    prompts = Prompts(lambda seed: 30 if seed % 5 == 0 else 1)
    admission = Bounded(max_staleness=1, in_completion_order=True, drops=True)
    (batches, ages, dispatcher), _ = run_in_virtual_time(drive(prompts, admission, steps=30, train_s=4))
    assert max(ages) == 1
    assert prompts.dropped
    assert set(accounted(prompts, batches, dispatcher).values()) == {1}


def test_a_state_holds_every_group_once_and_goes_on_where_it_was():
    async def until(step, prompts, state=None, taken=0):
        dispatcher = Dispatcher(prompts, last_step=10)
        dispatcher.admission = Bounded(max_staleness=2)
        prompts.taken = taken
        if state is not None:
            dispatcher.restore(state)
        batches = []
        async with dispatcher.open():
            begin = 0 if state is None else 5
            prompts.engine.version = begin
            dispatcher.weights_arrived(begin)
            for number in range(begin + 1, step + 1):
                batches.append([group[0].index for group in await dispatcher.next(number)])
                dispatcher.arrived()
                await asyncio.sleep(3)
                prompts.engine.version = number
                dispatcher.weights_arrived(number)
            return batches, dispatcher.snapshot()(), prompts.taken

    (unbroken, _, _), _ = run_in_virtual_time(until(10, Prompts(lengths)))
    (first, state, taken), _ = run_in_virtual_time(until(5, Prompts(lengths)))
    assert len(state["groups"]) == taken - 5 * BATCH
    assert {group["finished"] for group in state["groups"]} == {True, False}
    (second, _, _), _ = run_in_virtual_time(until(10, Prompts(lengths), state, taken))
    assert first + second == unbroken


def test_a_filter_that_drops_everything_is_an_error_that_says_so():
    for admission in (Waves(wave=BATCH), Bounded(max_staleness=1)):
        prompts = Prompts(lengths, drops=lambda index: True, section={"dynamic_sampling_max_waves": 3})
        with pytest.raises(
            DataError, match=r"step 1: after 3 waves .* 0 of 4 groups are kept; dropped: chosen: 12"
        ):
            run_in_virtual_time(drive(prompts, admission, steps=2))


def test_a_failure_of_a_later_group_is_raised_at_once():
    async def fails(ctx, sample, params):
        if sample.index == 3:
            raise ValueError("no such tool")
        return await single_turn(ctx, sample, params)

    for admission in (Waves(wave=BATCH), Bounded(max_staleness=1)):
        prompts = Prompts(lambda seed: 1000)
        prompts.generate = fails

        async def measured(prompts=prompts, admission=admission):
            with pytest.raises(SampleError, match=r"sample 3: .*no such tool"):
                await drive(prompts, admission, steps=1)

        _, took = run_in_virtual_time(measured())
        assert took == 0


def test_partial_responses_of_a_step_say_which_one_began_them():
    section = {"partial_rollout": True}
    prompts = Prompts(lambda seed: 1 if seed % 8 < 4 else 50, section=section)
    prompts.sizes.over_sampling_batch_size = 2 * BATCH

    async def two_steps():
        dispatcher = Dispatcher(prompts, last_step=2)
        dispatcher.admission = Waves(wave=2 * BATCH)
        first = await dispatcher.next(1)
        return first, list(prompts.buffer)

    (first, rest), _ = run_in_virtual_time(two_steps())
    assert [group[0].index for group in first] == [0, 1, 2, 3]
    assert [group[0].index for group in rest] == [4, 5, 6, 7]
    assert {group[0].status for group in rest} == {Status.ABORTED}
    assert {group[0].metadata["start_rollout_id"] for group in rest} == {0}


@pytest.mark.parametrize("flag", ["partial_rollout", "mask_offpolicy_in_partial_rollout", None])
def test_what_a_response_has_when_weights_arrive_is_masked_where_partial_responses_are(flag):
    """Responses take 9 s, one token a second, and weights arrive after 5."""
    both = ("partial_rollout", "mask_offpolicy_in_partial_rollout")
    prompts = Prompts(lambda seed: 9, section={name: flag in (name, None) for name in both})

    async def first_step():
        dispatcher = Dispatcher(prompts, last_step=1)
        dispatcher.admission = Bounded(max_staleness=1)
        async with dispatcher.open():
            filling = asyncio.ensure_future(dispatcher.next(1))
            await asyncio.sleep(5)
            async with dispatcher.interrupted():
                prompts.engine.version = 1
            return await filling

    groups, _ = run_in_virtual_time(first_step())
    assert [group[0].weight_versions for group in groups] == [["0", "1"]] * BATCH
    trained = [[0] * 5 + [1] * 4] if flag is None else [None, [1] * 9]
    assert all(group[0].loss_mask in trained for group in groups)


def test_with_a_limit_a_prompt_is_taken_when_its_request_is_the_next():
    """Four at once for 10 s each; weights come at 15, 25 and 35 s. One more than runs is taken, and then each as one waits no more."""
    taken = []

    class Noting(Prompts):
        def take(self, n):
            taken.extend([self.engine.version] * n)
            return super().take(n)

    def versions(section):
        taken.clear()
        prompts = Noting(lambda seed: 10, section=section)
        (batches, ages, _), took = run_in_virtual_time(
            drive(prompts, Bounded(max_staleness=4), steps=4, train_s=5)
        )
        return list(taken), batches, max(ages), took

    in_order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert versions({"rollout_concurrency": 4}) == ([0] * 9 + [1] * 4 + [2] * 3, in_order, 1, 45)
    assert versions({}) == ([0] * 16, in_order, 3, 30)


def test_with_a_limit_the_next_turn_waits_behind_one_group_at_most():
    """Two at once for 10 s each: of 40 prompts that the bound allows all are not begun before the first one's second turn."""
    ended = {}

    async def two_turns(ctx, sample, params):
        sample = await single_turn(ctx, sample, params)
        await ctx.engine.generate([0], params)
        ended[sample.index] = asyncio.get_running_loop().time()
        return sample

    prompts = Prompts(lambda seed: 10, section={"rollout_concurrency": 2})
    prompts.generate = two_turns
    run_in_virtual_time(drive(prompts, Bounded(max_staleness=9), steps=10, train_s=0))
    assert ended[0] <= 30
    assert list(ended) == list(range(40))


@pytest.mark.parametrize("in_completion_order", [False, True])
@pytest.mark.parametrize("mode", [None, "continue"])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("limit", [1, 3, 9])
def test_with_a_limit_the_bound_holds_and_every_prompt_is_used_once(bound, mode, in_completion_order, limit):
    section = {"rollout_concurrency": limit}
    prompts = Prompts(lengths, drops=lambda index: index % 3 == 0, section=section)
    admission = Bounded(max_staleness=bound, in_completion_order=in_completion_order)
    (batches, ages, dispatcher), _ = run_in_virtual_time(drive(prompts, admission, steps=40, mode=mode))
    assert len(batches) == 40
    assert max(ages) <= bound
    assert set(accounted(prompts, batches, dispatcher)) == set(range(prompts.taken))
    assert set(accounted(prompts, batches, dispatcher).values()) == {1}
