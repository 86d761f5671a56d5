"""Updates that end on the way: a mixture of two versions of the weights is never served."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import EngineError, WeightSyncError
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from slime_torch.generation.update import WeightUpdate
from slime_torch.storage.weights import Fused, Weights

from .test_update import GREEDY, PROMPT, Sender, in_buckets, scenario, with_bad

MIXTURE = "update to version 4 ended after 20 of 21 tensors"


class Dying(Sender):
    """Sends nothing: it does something while the engine waits, and dies."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile = meanwhile

    async def send(self, plan):
        await self.meanwhile()
        raise WeightSyncError("the trainer is gone")


async def mix(engine, new):
    """Leave the engine with the new weights but for one tensor."""
    with pytest.raises(WeightSyncError, match=r"1 of 21 tensors were not sent: model.layers.0.self_attn"):
        await sync_weights(Sender(with_bad(new.tensors(), "missing")), engine, version="4", timeout_s=120)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def served(engine, new):
    """Return what the engine answers after a whole update."""
    await sync_weights(Sender(*in_buckets(new.tensors())), engine, version="5", timeout_s=120)
    return await engine.generate(PROMPT, GREEDY)


def test_a_mixture_of_weights_is_never_served(tiny):
    new = tiny("llama", seed=1)

    async def body(engine):
        in_flight = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(max_new_tokens=200, min_new_tokens=200))
        )
        await until(lambda: engine._scheduler.running)
        await mix(engine, new)
        with pytest.raises(EngineError, match="mixture"):
            await in_flight
        with pytest.raises(EngineError, match=MIXTURE):
            await engine.generate(PROMPT, GREEDY)
        return await served(engine, new)

    answer = scenario(tiny("llama"), body)
    assert answer.weight_version == "5"
    assert answer.log_probs == pytest.approx(new.log_probs(PROMPT, answer.tokens), abs=1e-5)


def test_what_is_asked_during_an_update_that_leaves_a_mixture_as_it_was_is_refused(tiny):
    """The second update ends before its first tensor; what waits for it must not be generated."""
    new, asked = tiny("llama", seed=1), []

    async def body(engine):
        async def ask():
            await until(lambda: engine._mixture is None)
            asked.append(asyncio.create_task(engine.generate(PROMPT, GREEDY)))
            await until(lambda: engine._pending and not engine._fresh)  # the worker has it

        await mix(engine, new)
        with pytest.raises(WeightSyncError, match="the trainer is gone"):
            await sync_weights(Dying(ask), engine, version="6", timeout_s=120)
        with pytest.raises(EngineError, match=MIXTURE):
            await asked[0]
        with pytest.raises(EngineError, match=MIXTURE):
            await engine.generate(PROMPT, GREEDY)
        return await served(engine, new)

    assert scenario(tiny("llama"), body).weight_version == "5"


def test_what_was_asked_before_a_mixture_and_is_handed_over_after_it_is_refused(tiny):
    """New requests go to the worker once no more come; until then other calls keep coming here."""
    new, asked = tiny("llama", seed=1), []

    async def body(engine):
        async def ask():
            asked.append(asyncio.create_task(engine.generate(PROMPT, GREEDY)))
            await until(lambda: engine._fresh)
            while engine._mixture is None:
                engine._gather()
                await asyncio.sleep(0)

        calls = asyncio.create_task(ask())
        await until(lambda: engine._fresh)
        await mix(engine, new)
        await calls
        with pytest.raises(EngineError, match=MIXTURE):
            await asked[0]
        return await served(engine, new)

    assert scenario(tiny("llama"), body).weight_version == "5"


def test_an_update_that_fails_within_its_first_bucket_leaves_a_mixture():
    first, second = (Fused({name: (2, 3)}, dtype=torch.float32, device=torch.device("cpu")) for name in "ab")
    update = WeightUpdate(Weights([first, second]), version="7")
    assert update.mixture is None
    second.tensor = torch.zeros(0, 3)  # nothing can be written to it
    with pytest.raises(RuntimeError, match="size"):
        update.take([(name, torch.ones(2, 3)) for name in "ab"])
    assert torch.equal(first.tensor, torch.ones(2, 3))
    assert "update to version 7 ended after 2 of 2 tensors" in str(update.mixture)
