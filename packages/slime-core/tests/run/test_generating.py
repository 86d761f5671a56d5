"""What a snapshot of the generating half holds, whenever the loop that waits for it is cancelled: every prompt once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
from slime_core.config.sections import (
    ClusterSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrainSection,
)
from slime_core.config.settings import Settings
from slime_core.data.buffers import FifoBuffer
from slime_core.protocols import EngineCapabilities
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.rollouts.default import rollout
from slime_core.run.generating import GeneratingHalf
from slime_core.run.supply import supplied
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Sample
from slime_core.testing.tabular import LetterTokenizer

from ..rollout.timed_prompts import BATCH, TimedEngine

TRAIN_S = 20.0


class Source:
    """Prompts without end."""

    def __init__(self):
        self.taken = 0

    def take(self, n):
        first, self.taken = self.taken, self.taken + n
        return [[Sample(index=i, group_index=i, tokens=[0])] for i in range(first, self.taken)]

    def state(self):
        return {"taken": self.taken}


class Engine(TimedEngine):
    """Answers after a second; asks for weights, and never lacks them."""

    def __init__(self, *, asks):
        super().__init__(lambda seed: 1)
        self.capabilities = EngineCapabilities(asks_for_weights=asks)

    async def weights_wanted(self, version):
        await asyncio.Event().wait()


class Half(GeneratingHalf):
    """A half whose other one does nothing."""

    async def ready_engine(self):
        pass

    async def supplied(self, work):
        return await supplied(work, self.engine, version=0, send=self.ready_engine)

    def timed(self, phase):
        return contextlib.nullcontext()

    def report(self, phase, done, total):
        pass


async def with_a_tool(ctx, sample, params):
    """An answer, and behind the prompts of a step's batch a minute of a tool that no abort ends."""
    sample = await single_turn(ctx, sample, params)
    if sample.index >= BATCH:
        await asyncio.sleep(60)
    return sample


async def after_a_while(run, step):
    """A rollout of somebody else's, which asks the dispatcher."""
    await asyncio.sleep(5)
    groups = await run.next_groups(step)
    await asyncio.sleep(5)
    return groups


def half(*, function=rollout, asks=False, generate=single_turn, submitted=BATCH):
    sections = {
        "rollout": RolloutSection(
            rollout_batch_size=BATCH, n_samples_per_prompt=1, rollout_max_response_len=9
        ),
        "reward": RewardSection(),
        "train": TrainSection(),
        "run": RunSection(loop="one-step-off"),
        "cluster": ClusterSection(),
    }
    return Half(
        settings=Settings(sections, {}, {}),
        registry=None,
        tokenizer=LetterTokenizer(),
        source=Source(),
        buffer=FifoBuffer(),
        engine=Engine(asks=asks),
        generate=generate,
        scorer=None,
        sizes=SimpleNamespace(rollout_batch_size=BATCH, over_sampling_batch_size=submitted),
        num_steps=9,
        rollout_fn=function,
        drop_reason=lambda group: None,
    )


def accounted(state):
    """How often each prompt that the source counts as taken is in a state."""
    groups = [one["samples"] for one in state["dispatcher"]["groups"]]
    groups += state["buffer"]["groups"] + [group for step in state["ahead"] for group in step["groups"]]
    return Counter(group[0]["index"] for group in groups), state["source"]["taken"]


async def cancelled_after(run, seconds):
    """Generate a step beside training, and cancel both some time after training has begun; the state then."""

    async def loop():
        async with run.generating(1):
            await asyncio.sleep(TRAIN_S)

    task = asyncio.ensure_future(loop())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() or task.exception() is None
    return run.snapshot()()


@pytest.mark.parametrize("asks", [False, True])
def test_a_step_that_was_generated_while_the_other_was_trained_is_kept_where_the_loop_is_ended_then(asks):
    """As a request to stop is held back until training is over: it then ends the wait for what is done already."""
    run = half(asks=asks)

    async def trained_and_ended():
        async with run.generating(1):
            await asyncio.sleep(TRAIN_S)
            asyncio.current_task().cancel()

    async def state():
        await asyncio.wait({asyncio.ensure_future(trained_and_ended())})
        return run.snapshot()()

    found, taken = accounted(run_in_virtual_time(state())[0])
    assert (found, taken) == (Counter(range(BATCH)), BATCH)
    assert list(run.ahead) == [1]


@pytest.mark.parametrize("seconds", [0.5, 1, 1.5, 2, 7, 59, 61, 70])
@pytest.mark.parametrize("asks", [False, True])
def test_a_batch_that_is_full_is_kept_while_surplus_groups_are_waited_for(asks, seconds):
    """The batch is full after a second, and its surplus in a tool until 61 s."""
    run = half(asks=asks, generate=with_a_tool, submitted=2 * BATCH)
    found, taken = accounted(run_in_virtual_time(cancelled_after(run, seconds))[0])
    assert found == Counter(range(taken))
    assert taken == 2 * BATCH


@pytest.mark.parametrize("seconds", [0.5, 5, 5.5, 6, 7, 10, 12])
def test_a_rollout_that_asks_the_dispatcher_begins_anew_from_where_all_three_were(seconds):
    """It asks after 5 s, has its groups after 6, and returns them after 11."""
    run = half(function=after_a_while)
    found, taken = accounted(run_in_virtual_time(cancelled_after(run, seconds))[0])
    assert found == Counter(range(taken))
    assert taken == (BATCH if seconds == 12 else 0)
