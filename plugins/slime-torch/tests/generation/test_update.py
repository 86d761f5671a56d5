"""Weight updates: by `memory`, as the buckets come, and by the other transports, which are staged first."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import pytest
import torch
from slime_core.errors import EngineError, WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams, TrainerCapabilities
from slime_core.weights.sync import sync_weights
from slime_models.family.families.llama import LLAMA
from slime_models.groups import OWN_TRANSPORTS
from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.staging import StagingFolder
from slime_torch.engine import TorchEngine
from slime_torch.generation.update import staged_buckets
from slime_torch.section import TorchSection
from slime_torch.storage.weights import Fused, Weights

from ..conftest import FAMILIES

GREEDY = SamplingParams(max_new_tokens=16, min_new_tokens=16, temperature=0)
PROMPT = [5, 6, 7, 8]


class Sender:
    """The sending half of a trainer: a list of buckets."""

    capabilities = TrainerCapabilities(transports=("memory",))

    def __init__(self, *buckets, float32=()):
        self.buckets, self.float32 = buckets, float32

    async def send(self, plan):
        dtype = getattr(torch, plan.dtype)
        sent = {}
        for bucket in self.buckets:
            cast = [(name, tensor if name in self.float32 else tensor.to(dtype)) for name, tensor in bucket]
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


KINDS = (
    *("llama", "qwen2", "qwen3", "glm4", "glm", "mimo", "gpt_oss", "minimax_m2"),
    *("qwen2_moe", "qwen3_moe", "glm4_moe", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe_text", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
)
#: Kinds whose indexer chooses other tokens where bfloat16 rounds otherwise, so that log-probs jump.
CHOOSING = ("deepseek_v32", "glm_moe_dsa")


@pytest.mark.proves("{kind}", "torch")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *itertools.product((*KINDS, *CHOOSING), [torch.float32]),
        *itertools.product(KINDS, [torch.bfloat16]),
    ],
)
def test_after_an_update_the_engine_holds_and_serves_the_new_weights(tiny, kind, dtype):
    new = tiny(kind, seed=1)
    float32 = FAMILIES[kind].float32(tiny(kind).architecture)

    async def body(engine):
        sender = Sender(*in_buckets(new.tensors()), float32=float32)
        transport = await sync_weights(sender, engine, version="7", timeout_s=120)
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
        x = hidden.to(engine.device)
        wanted = x @ new.to(engine.device).T
        return engine.model.embedding.tensor.cpu(), engine.model.logits(x), wanted

    embedding, logits, wanted = scenario(tiny("qwen2"), body, dtype=torch.bfloat16)
    assert torch.equal(embedding, new)
    assert torch.equal(logits, wanted)


def test_copies_that_differ_have_no_fingerprint():
    parts = {"embed": (2, 3)}
    first, second = (Fused(parts, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    weights = Weights([first, second])
    weights.write({"embed": torch.ones(2, 3)})
    assert weights.fingerprint() == {"embed": fingerprint(torch.ones(2, 3))}
    first.write({"embed": torch.zeros(2, 3)})
    with pytest.raises(WeightSyncError, match="embed: its two copies in the engine differ"):
        weights.fingerprint()


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_requests_in_flight_go_on_with_the_new_weights(tiny, keeps_cache):
    """Recomputed, what follows is what the new weights alone make of prompt and earlier tokens; kept, it is not."""
    params = SamplingParams(max_new_tokens=150, min_new_tokens=150, temperature=0)
    new = tiny("llama", seed=1)

    async def body(engine):
        old = await engine.generate(PROMPT, params)
        task = asyncio.create_task(engine.generate(PROMPT, params))
        while not any(len(request.tokens) > 3 for request in engine._scheduler.running):
            await asyncio.sleep(0)
        await sync_weights(Sender(*in_buckets(new.tensors())), engine, version="2", timeout_s=30)
        return old, await task

    old, across = scenario(tiny("llama"), body, keeps_cache=keeps_cache)
    first, second = across.metadata["weight_versions"]
    n = first["end"]
    assert (old.weight_version, across.weight_version) == ("initial", "2")
    assert first == {"version": "initial", "start": 0, "end": n}
    assert second == {"version": "2", "start": n, "end": 150}
    assert 4 <= n < 150
    assert across.tokens[:n] == old.tokens[:n]
    assert across.log_probs[:n] == old.log_probs[:n]
    wanted = new.log_probs([*PROMPT, *across.tokens[:n]], across.tokens[n:])
    if keeps_cache:
        assert across.log_probs[n:] != pytest.approx(wanted, abs=1e-2)
    else:
        assert across.log_probs[n:] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_what_is_asked_after_an_update_shares_nothing_with_what_was_prefilled_before_it(tiny, keeps_cache):
    """A twin of the prompt is in flight, whose prefix would be copied without an update."""
    params = SamplingParams(max_new_tokens=200, min_new_tokens=200, temperature=0)
    new = tiny("llama", seed=1)

    async def body(engine):
        twin = asyncio.create_task(engine.generate(PROMPT, params))
        while not any(len(request.tokens) > 3 for request in engine._scheduler.running):
            await asyncio.sleep(0)
        await sync_weights(Sender(*in_buckets(new.tensors())), engine, version="2", timeout_s=30)
        answer = await engine.generate(PROMPT, GREEDY)
        twin.cancel()
        return answer

    async def fresh(engine):
        return await engine.generate(PROMPT, GREEDY)

    after, alone = scenario(tiny("llama"), body, keeps_cache=keeps_cache), scenario(new, fresh)
    assert after.tokens == alone.tokens
    assert after.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def with_bad(tensors, fault):
    items = list(tensors.items())
    name = "model.layers.0.self_attn.v_proj.weight"
    place, tensor = list(tensors).index(name), tensors[name]
    if fault == "unknown":
        items[place] = ("model.layers.9.mlp.up_proj.weight", tensor)
    elif fault == "misshapen":
        items[place] = (name, tensor[:-1])
    elif fault == "duplicate":
        items.insert(0, items[place])
    elif fault == "missing":
        items.pop(place)
    return items


@pytest.mark.parametrize("fault", ["unknown", "misshapen", "duplicate"])
def test_a_bad_tensor_is_named_and_the_old_weights_keep_serving(tiny, fault):
    old, new = tiny("llama"), tiny("llama", seed=1)
    items = with_bad(new.tensors(), fault)

    async def body(engine):
        with pytest.raises(WeightSyncError, match=r"up_proj|v_proj"):
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
            WeightSyncError, match=r"\w+\.weight: found dtype torch.float64; wanted torch.float32"
        ):
            await receiving
        sending.cancel()

    scenario(tiny("llama"), body)


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


class AnySender(Sender):
    """Sends by any installed transport."""

    capabilities = TrainerCapabilities(other_transports=True)

    async def send(self, plan):
        async def buckets():
            for bucket in self.buckets:
                yield bucket, {name: fingerprint(tensor) for name, tensor in bucket}

        return await WeightSender(asyncio.to_thread, Registry()).send(plan, buckets())


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_by_every_transport_the_engine_gets_the_new_weights_and_refuses_an_incomplete_update(tiny, transport):
    new = tiny("llama", seed=1)

    async def body(engine):
        update = partial(sync_weights, engine=engine, timeout_s=120, transport=transport)
        await update(AnySender(*in_buckets(new.tensors())), version="1")
        answer = await engine.generate(PROMPT, GREEDY)
        if transport != "memory":  # which writes as the buckets come
            with pytest.raises(
                WeightSyncError, match=r"1 of 21 tensors were not sent: model.layers.0.self_attn"
            ):
                await update(AnySender(with_bad(tiny("llama").tensors(), "missing")), version="2")
            assert (await engine.generate(PROMPT, GREEDY)).log_probs == answer.log_probs
        await update(AnySender(*in_buckets(new.tensors())), version="3")
        return answer

    answer = scenario(tiny("llama"), body)
    assert answer.weight_version == "1"
    assert answer.log_probs == pytest.approx(new.log_probs(PROMPT, answer.tokens), abs=1e-5)


def test_a_staged_tensor_that_changed_is_named_and_the_old_weights_keep_serving(tiny):
    old = tiny("llama")
    (name, tensor), *rest = tiny("llama", seed=1).tensors().items()

    class Damaged(AnySender):
        async def send(self, plan):
            async def buckets():
                changed = tensor.clone()
                changed[0, 0] += 1
                yield [(name, changed)], {name: fingerprint(tensor)}
                yield rest, {name: fingerprint(tensor) for name, tensor in rest}

            return await WeightSender(asyncio.to_thread, Registry()).send(plan, buckets())

    async def body(engine):
        with pytest.raises(WeightSyncError, match=f"version 1: {name}: the bytes that arrived are not those"):
            await sync_weights(Damaged(), engine, version="1", timeout_s=120, transport="disk")
        return await engine.generate(PROMPT, GREEDY)

    answer = scenario(old, body)
    assert answer.weight_version == "initial"
    assert answer.log_probs == pytest.approx(old.log_probs(PROMPT, answer.tokens), abs=1e-5)


def test_staged_tensors_come_in_buckets_of_so_many_bytes(tmp_path):
    """Of 40 bytes each, but for one of 400."""
    specs = {name: Spec(shape=(100 if name == "d" else 10,), dtype="float32") for name in "abcde"}
    staging = StagingFolder(tmp_path, specs=specs)
    staging.begin("1")
    staging.put([(name, torch.ones(spec.shape)) for name, spec in specs.items()], {})
    update = staging.seal()

    async def buckets(**most):
        return ["".join(dict(bucket)) async for bucket in staged_buckets(update, **most)]

    assert asyncio.run(buckets()) == ["abcde"]
    assert asyncio.run(buckets(bucket_bytes=100)) == ["ab", "c", "d", "e"]


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        ("pigeon", r"version 1: slime\.transports: no plugin is named 'pigeon'"),
        ("nccl", "version 1: transport nccl is for engines whose servers have ranks of their own"),
    ],
)
def test_an_unknown_transport_and_one_for_ranks_of_servers_are_refused(tiny, transport, why):
    async def body(engine):
        with pytest.raises(WeightSyncError, match=why):
            await engine.open_update(transport, "1")

    scenario(tiny("llama"), body)


def test_an_engine_without_a_receiver_takes_no_update(tiny, tokenizer):
    model = tiny("llama")

    async def main():
        engine = TorchEngine(model.folder, LLAMA, tokenizer, dtype=torch.float32, section=TorchSection())
        await engine.start()
        try:
            with pytest.raises(EngineError, match="built without a receiver of weight updates"):
                await engine.open_update("memory", "1")
        finally:
            await engine.close()

    asyncio.run(main())


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
