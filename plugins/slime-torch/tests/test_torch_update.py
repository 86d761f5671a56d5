"""Weight updates by the transport `memory`."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import EngineError, WeightSyncError
from slime_core.protocols import SamplingParams
from slime_core.weights import sync_weights
from slime_models.fingerprint import fingerprint
from slime_torch.weights import Fused, Weights

GREEDY = SamplingParams(max_new_tokens=16, min_new_tokens=16, temperature=0)
PROMPT = [5, 6, 7, 8]


class Sender:
    """The sending half of a trainer: a list of buckets."""

    transports = ("memory",)

    def __init__(self, *buckets):
        self.buckets = buckets

    async def send(self, plan):
        dtype = getattr(torch, plan.dtype)
        sent = {}
        for bucket in self.buckets:
            cast = [(name, tensor.to(dtype)) for name, tensor in bucket]
            sent |= {name: fingerprint(tensor) for name, tensor in cast}
            await plan.channel.put(cast)
        await plan.channel.end()
        return sent


def in_buckets(tensors, size=5):
    items = list(tensors.items())
    return [items[i : i + size] for i in range(0, len(items), size)]


def scenario(model, body, **options):
    async def main():
        async with asyncio.timeout(300), model.serving(**options) as engine:
            return await body(engine)

    return asyncio.run(main())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_after_an_update_the_engine_holds_and_serves_the_new_weights(tiny, kind, dtype):
    new = tiny(kind, seed=1)

    async def body(engine):
        transport = await sync_weights(Sender(*in_buckets(new.tensors())), engine, version="7", timeout_s=120)
        return transport, await engine.generate(PROMPT, GREEDY)

    transport, answer = scenario(tiny(kind), body, dtype=dtype)
    assert (transport, answer.weight_version) == ("memory", "7")
    tolerance = 1e-5 if dtype == torch.float32 else 0.3
    assert answer.log_probs == pytest.approx(new.log_probs(PROMPT, answer.tokens), abs=tolerance)


def test_the_fingerprint_is_of_the_tensors_as_stored(tiny):
    async def body(engine):
        plan = await engine.open_update("memory", "1")
        held, _ = await asyncio.gather(
            engine.receive(plan), Sender(*in_buckets(tiny("qwen2", seed=1).tensors())).send(plan)
        )
        return held

    wanted = {name: fingerprint(t.bfloat16()) for name, t in tiny("qwen2", seed=1).tensors().items()}
    assert scenario(tiny("qwen2"), body, dtype=torch.bfloat16) == wanted


def test_an_update_reaches_tied_weights_wherever_they_lie(tiny):
    new = tiny("qwen2", seed=1).tensors()["model.embed_tokens.weight"].bfloat16()
    hidden = torch.randn(3, new.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()

    async def body(engine):
        await sync_weights(
            Sender(*in_buckets(tiny("qwen2", seed=1).tensors())), engine, version="1", timeout_s=30
        )
        return engine.model.embedding.tensor, engine.model.logits(hidden)

    embedding, logits = scenario(tiny("qwen2"), body, dtype=torch.bfloat16)
    assert torch.equal(embedding, new)
    assert torch.equal(logits, hidden @ new.T)


def test_copies_that_differ_have_no_fingerprint():
    parts = {"embed": (2, 3)}
    first, second = (Fused(parts, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    weights = Weights([first, second])
    weights.write({"embed": torch.ones(2, 3)})
    assert weights.fingerprint() == {"embed": fingerprint(torch.ones(2, 3))}
    first.write({"embed": torch.zeros(2, 3)})
    with pytest.raises(WeightSyncError, match="embed: its two copies in the engine differ"):
        weights.fingerprint()


def test_requests_under_way_go_on_with_the_new_weights(tiny):
    params = SamplingParams(max_new_tokens=150, min_new_tokens=150, temperature=0)

    async def body(engine):
        old = await engine.generate(PROMPT, params)
        task = asyncio.create_task(engine.generate(PROMPT, params))
        while not any(len(request.tokens) > 3 for request in engine._scheduler.running):
            await asyncio.sleep(0)
        await sync_weights(
            Sender(*in_buckets(tiny("llama", seed=1).tensors())), engine, version="2", timeout_s=30
        )
        return old, await task, await engine.generate(PROMPT, params)

    old, across, new = scenario(tiny("llama"), body)
    assert (old.weight_version, across.weight_version) == ("initial", "2")
    assert across.tokens[:4] == old.tokens[:4]
    assert across.tokens != old.tokens
    assert across.tokens != new.tokens


def with_bad(tensors, fault):
    items = list(tensors.items())
    name, tensor = items[3]
    if fault == "unknown":
        items[3] = ("model.layers.9.mlp.up_proj.weight", tensor)
    elif fault == "misshapen":
        items[3] = (name, tensor[:-1])
    elif fault == "duplicate":
        items.insert(0, items[3])
    elif fault == "missing":
        items.pop(3)
    return items


@pytest.mark.parametrize("fault", ["unknown", "misshapen", "duplicate"])
def test_a_bad_tensor_is_named_and_the_old_weights_keep_serving(tiny, fault):
    old, new = tiny("llama"), tiny("llama", seed=1)
    items = with_bad(new.tensors(), fault)

    async def body(engine):
        with pytest.raises(WeightSyncError, match=r"up_proj|v_proj|k_proj|o_proj"):
            await sync_weights(Sender(items), engine, version="3", timeout_s=120)
        return await engine.generate(PROMPT, GREEDY)

    answer = scenario(old, body)
    assert answer.weight_version == "initial"
    assert answer.log_probs == pytest.approx(old.log_probs(PROMPT, answer.tokens), abs=1e-5)


def test_a_tensor_of_another_dtype_is_refused(tiny):
    async def body(engine):
        plan = await engine.open_update("memory", "3")
        bucket = [(name, tensor.double()) for name, tensor in tiny("llama").tensors().items()]
        receiving = asyncio.create_task(engine.receive(plan))
        sending = asyncio.create_task(plan.channel.put(bucket))
        with pytest.raises(
            WeightSyncError, match=r"embed_tokens.weight: found dtype torch.float64; wanted torch.float32"
        ):
            await receiving
        sending.cancel()

    scenario(tiny("llama"), body)


def test_a_mixture_of_weights_is_never_served(tiny):
    new = tiny("llama", seed=1)
    items = with_bad(new.tensors(), "missing")

    async def body(engine):
        under_way = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(max_new_tokens=200, min_new_tokens=200))
        )
        while not engine._scheduler.running:
            await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match=r"1 of 21 tensors were not sent: model.layers.0.self_attn"):
            await sync_weights(Sender(items), engine, version="4", timeout_s=120)
        with pytest.raises(EngineError, match="mixture"):
            await under_way
        with pytest.raises(EngineError, match="update to version 4 ended after 20 of 21 tensors"):
            await engine.generate(PROMPT, GREEDY)
        await sync_weights(Sender(*in_buckets(new.tensors())), engine, version="5", timeout_s=120)
        return await engine.generate(PROMPT, GREEDY)

    answer = scenario(tiny("llama"), body)
    assert answer.weight_version == "5"
    assert answer.log_probs == pytest.approx(new.log_probs(PROMPT, answer.tokens), abs=1e-5)


def test_an_update_whose_sender_dies_leaves_the_engine_serving(tiny):
    class Dead(Sender):
        async def send(self, plan):
            raise WeightSyncError("the trainer is gone")

    async def body(engine):
        with pytest.raises(WeightSyncError, match="the trainer is gone"):
            await sync_weights(Dead(), engine, version="6", timeout_s=120)
        return await engine.generate(PROMPT, GREEDY)

    assert scenario(tiny("llama"), body).weight_version == "initial"


def test_the_weights_are_held_once(tiny):
    """An update allocates no second model: storage stays where it was."""
    model = tiny("qwen3")

    async def body(engine):
        before = {id(f): f.tensor.data_ptr() for f in engine.model.weights._fused}
        await sync_weights(Sender(*in_buckets(model.tensors())), engine, version="1", timeout_s=120)
        return before == {id(f): f.tensor.data_ptr() for f in engine.model.weights._fused}

    assert scenario(model, body)


def test_an_unknown_transport_is_refused(tiny):
    async def body(engine):
        with pytest.raises(WeightSyncError, match="nccl"):
            await engine.open_update("nccl", "1")

    scenario(tiny("llama"), body)


def test_an_update_that_was_not_agreed_on_is_refused_and_the_old_weights_serve(tiny):
    model = tiny("llama")

    async def body(engine):
        old = await engine.open_update("memory", "7")
        await engine.open_update("memory", "8")
        with pytest.raises(WeightSyncError, match="version 7: the engine has agreed on version 8"):
            await engine.receive(old)
        return await engine.generate(PROMPT, GREEDY)

    answer = scenario(model, body, dtype=torch.float32)
    assert answer.weight_version == "initial"
    assert answer.log_probs == pytest.approx(model.log_probs(PROMPT, answer.tokens), abs=1e-5)
