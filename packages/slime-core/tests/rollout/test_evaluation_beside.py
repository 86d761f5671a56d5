"""An evaluation in the middle of a run, in virtual time: it neither aborts nor delays what is in flight."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.config.sections import EvalSection, RewardSection
from slime_core.config.settings import Settings
from slime_core.rollout.admission import Bounded
from slime_core.rollout.dispatcher import Dispatcher
from slime_core.run.evaluation import evaluate_groups
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Sample, Status

from .timed_prompts import Prompts, lengths

STEPS, EVALUATED_AT, FIRST_HELD_OUT = 6, 3, 10_000


class HeldOut:
    """Five prompts whose responses take 3 to 15 seconds."""

    def __len__(self):
        return 5

    def restore(self, state):
        pass

    def take(self, n):
        return [[Sample(index=FIRST_HELD_OUT + i, tokens=[0], reward=0.0)] for i in range(n)]


def seconds(seed):
    """Held-out responses take 3, 6, ... seconds, those of training have a heavy tail."""
    held_out = (seed & (1 << 39)) and (seed & 0xFFFF) - FIRST_HELD_OUT + 1
    return 3 * held_out if held_out else lengths(seed)


async def train(prompts, *, evaluate, mode):
    """Run the steps of fully-async; returns the batches, when each was there, and the evaluated groups."""
    dispatcher, loop = Dispatcher(prompts, last_step=STEPS), asyncio.get_running_loop()
    dispatcher.admission = Bounded(max_staleness=2)
    batches, evaluated = [], []
    async with dispatcher.open():
        dispatcher.weights_arrived(0)
        for step in range(1, STEPS + 1):
            groups = await dispatcher.next(step)
            batches.append((loop.time(), [[vars(one) for one in group] for group in groups]))
            prompts.engine.version = step
            if mode == "continue":
                async with dispatcher.interrupted():
                    await asyncio.sleep(1)
            dispatcher.weights_arrived(step)
            if step == EVALUATED_AT:
                before = loop.time()
                if evaluate:
                    await evaluate_groups(prompts, HeldOut(), step=step, start={}, write=evaluated.extend)
                else:
                    await asyncio.sleep(15)
                assert loop.time() - before == 15
    return batches, evaluated


@pytest.mark.parametrize("mode", ["recompute", "continue"])
def test_an_evaluation_neither_aborts_nor_delays_what_is_in_flight(mode):
    """The same as a pause of the loop that is as long as the evaluation, its longest response of 15 seconds."""
    found = []
    for evaluate in (True, False):
        prompts = Prompts(seconds)
        sections = {
            "rollout": prompts.rollout,
            "reward": RewardSection(),
            "eval": EvalSection(eval_max_response_len=100),
        }
        prompts.settings = Settings(sections, {}, {})
        found.append(run_in_virtual_time(train(prompts, evaluate=evaluate, mode=mode))[0])
    (batches, evaluated), (plain, nothing) = found
    for (when, groups), (when_plain, groups_plain) in zip(batches, plain, strict=True):
        assert when == when_plain
        for group, group_plain in zip(groups, groups_plain, strict=True):
            assert without_times(group) == without_times(group_plain)
    (samples,) = zip(*evaluated, strict=True)
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert [sample.response_length for sample in samples] == [3, 6, 9, 12, 15]
    assert all(sample.weight_versions == [str(EVALUATED_AT)] for sample in samples)
    assert nothing == []


def test_weights_for_an_engine_that_came_back_end_no_evaluation():
    """They end the requests of the engine, after 5 of the 3 to 15 seconds; each response goes on from its tokens."""
    prompts, evaluated = Prompts(seconds), []
    sections = {
        "rollout": prompts.rollout,
        "reward": RewardSection(),
        "eval": EvalSection(eval_max_response_len=100),
    }
    prompts.settings = Settings(sections, {}, {})

    async def evaluation():
        evaluating = evaluate_groups(prompts, HeldOut(), step=3, start={}, write=evaluated.extend)
        task = asyncio.ensure_future(evaluating)
        await asyncio.sleep(5)
        prompts.engine.version = 1
        await prompts.engine.abort()
        await task

    _, took = run_in_virtual_time(evaluation())
    (samples,) = zip(*evaluated, strict=True)
    assert took == 15
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert [sample.response_length for sample in samples] == [3, 6, 9, 12, 15]
    assert [sample.weight_versions for sample in samples] == [["0"]] + [["0", "1"]] * 4


def test_a_generator_that_calls_its_own_sample_aborted_is_not_asked_for_ever():
    asked = []

    async def gives_up(ctx, sample, params):
        asked.append(sample.index)
        sample.status = Status.ABORTED
        return sample

    prompts = Prompts(seconds)
    prompts.generate = gives_up
    sections = {"rollout": prompts.rollout, "reward": RewardSection(), "eval": EvalSection()}
    prompts.settings = Settings(sections, {}, {})
    evaluating = evaluate_groups(prompts, HeldOut(), step=3, start={}, write=lambda groups: None)
    run_in_virtual_time(evaluating)
    assert sorted(asked) == [FIRST_HELD_OUT + i for i in range(5)]


def without_times(group):
    return [{name: value for name, value in one.items() if name != "timings"} for one in group]
