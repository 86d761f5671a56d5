"""Weight updates of a real server: what it then serves, and what is refused with the old weights still serving."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import pytest
import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams, TrainerCapabilities
from slime_core.weights.sync import sync_weights
from slime_models.groups import OWN_TRANSPORTS
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.staging import StagedTensors, StagingFolder
from slime_sglang.generation.response import PartialResponse
from slime_sglang.weights.apply import check_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


class Sender:
    """The sending half of a trainer, of tensors that each update may bring anew."""

    capabilities = TrainerCapabilities(other_transports=True)

    def __init__(self):
        self.sender = WeightSender(asyncio.to_thread, Registry())
        self.tensors, self.corrupt, self.at_end, self.change_plan = [], None, None, None
        self.hangs = False

    async def buckets(self):
        for start in range(0, len(self.tensors), 5):
            bucket = self.tensors[start : start + 5]
            fingerprints = {name: fingerprint(tensor) for name, tensor in bucket}
            yield [(name, self.on_its_way(name, tensor)) for name, tensor in bucket], fingerprints
        if self.at_end is not None:
            self.at_end()
        if self.hangs:
            await asyncio.Event().wait()

    def on_its_way(self, name, tensor):
        if name != self.corrupt:
            return tensor
        damaged = tensor.clone()
        damaged.view(torch.uint8).view(-1)[11] ^= 4
        return damaged

    async def send(self, plan):
        return await self.sender.send(self.change_plan(plan) if self.change_plan else plan, self.buckets())


def tensors_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def update(serving, tensors, version, *, transport="memory", sender=None, **faults):
    """Bring tensors to the server, with a new sender or one that sent before."""
    sender = sender or Sender()
    sender.tensors = list(tensors)
    sender.corrupt, sender.at_end, sender.change_plan = (
        faults.get(name) for name in ("corrupt", "at_end", "change_plan")
    )
    work = sync_weights(sender, serving.engine, version=version, timeout_s=240, transport=transport)
    serving.run(work)


@pytest.fixture
def check_serves(serving, log_probs_of):
    """Checks that the server's weights are those of a model."""

    def check(model):
        answer = serving.run(serving.engine.generate(PROMPT, GREEDY))
        log_probs, likeliest = log_probs_of(model, PROMPT, answer.tokens)
        assert answer.tokens == likeliest
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)

    return check


@pytest.fixture
def restored(serving, model):
    """The server, which gets the weights of `model` back afterwards."""
    yield serving
    update(serving, tensors_of(model), "back")


@pytest.mark.parametrize("transport", (*OWN_TRANSPORTS, "nccl", "cuda-ipc"))
@pytest.mark.proves("llama", "sglang")
def test_after_twenty_updates_the_server_is_the_newest_model(restored, tiny_llama, check_serves, transport):
    models, sender = [tiny_llama(seed) for seed in (1, 2, 3)], Sender()
    for number in range(20):
        update(restored, tensors_of(models[number % 3]), str(number), transport=transport, sender=sender)
        if number % 5 == 4:
            check_serves(models[number % 3])
    answer = restored.run(restored.engine.generate(PROMPT, GREEDY))
    assert answer.weight_version == "19"


def test_requests_in_flight_go_on_with_the_new_weights(
    restored, tiny_llama, log_probs_of, endless, in_flight
):
    engine, response = restored.engine, PartialResponse(PROMPT, endless)

    class LateSender(Sender):
        """Has a request in flight by the time that all is sent."""

        async def buckets(self):
            async for bucket in super().buckets():
                yield bucket
            self.request = asyncio.ensure_future(engine.extend(response, stream=True))
            await in_flight(response)

    sender = LateSender()
    sender.tensors = tensors_of(tiny_llama(1))

    async def scenario():
        await sync_weights(sender, engine, version="mid", timeout_s=240)
        await in_flight(response, len(response.completion("none").tokens) + 50)
        await engine.abort()
        await sender.request
        return response.completion("none")

    answer = restored.run(scenario())
    spans = answer.metadata["weight_versions"]
    assert [span["version"] for span in spans][-1] == "mid"
    begin, n_tokens = spans[-1]["start"], len(answer.tokens)
    assert 0 < begin < begin + 40 < n_tokens  # an event of a few tokens may have been on its way
    before, after = slice(max(0, begin - 100), begin - 1), slice(begin + 1, begin + 40)
    for version, place in ((tiny_llama(0), before), (tiny_llama(1), after)):
        _, likeliest = log_probs_of(version.double(), PROMPT, answer.tokens, can_end=False)
        assert answer.tokens[place] == likeliest[place]


def test_requests_in_flight_that_keep_their_cache_and_others_that_share_nothing_with_it(
    restored, tiny_llama, model, check_serves, endless, in_flight, log_probs_of, monkeypatch
):
    """After the update the prompt that is in the prefix cache, of the old weights, is answered as by a fresh server."""
    engine, response = restored.engine, PartialResponse(PROMPT, endless)
    monkeypatch.setattr(engine, "_settings", dataclasses.replace(engine._settings, keeps_cache=True))
    new, sender = tiny_llama(1), Sender()
    sender.tensors = tensors_of(new)

    async def before():
        request = asyncio.ensure_future(engine.extend(response, stream=True))
        await in_flight(response)
        await engine.generate(PROMPT, GREEDY)  # is in the prefix cache when it is done
        await sync_weights(sender, engine, version="kept", timeout_s=240)
        await in_flight(response, len(response.completion("none").tokens) + 50)
        return request

    async def end(request):
        await engine.abort()
        await request
        return response.completion("none")

    request = restored.run(before())
    check_serves(new)
    answer = restored.run(end(request))
    first, second = answer.metadata["weight_versions"]
    n = second["start"]
    assert second["version"] == "kept"
    assert first["start"] == 0
    assert 0 < first["end"] == n < second["end"] == len(answer.tokens)
    old, _ = log_probs_of(model, PROMPT, answer.tokens[:n], can_end=False)
    assert answer.log_probs[:n] == pytest.approx(old, abs=1e-5, rel=0)
    recomputed, _ = log_probs_of(new, [*PROMPT, *answer.tokens[:n]], answer.tokens[n:], can_end=False)
    assert answer.log_probs[n:] != pytest.approx(recomputed, abs=1e-3, rel=0)


def test_after_its_memory_was_released_a_server_gets_weights_before_its_cache(
    restored, tiny_llama, check_serves
):
    sender, engine = Sender(), restored.engine
    sender.tensors = tensors_of(tiny_llama(1))

    async def scenario():
        await engine.offload()
        before = len(restored.log.read_text())
        await engine.onload()
        await engine.probe(timeout_s=60)  # generates nothing, for which there is no cache
        await sync_weights(sender, engine, version="1", timeout_s=240)
        await asyncio.sleep(1)
        return before

    before = restored.run(scenario())

    def told():
        asked = re.findall(r'"(?:POST|GET) /(\w+) HTTP', restored.log.read_text()[before:])
        return [path for path in asked if path != "health"]

    update = [
        "pause_generation",
        "begin_weight_update",
        *["update_weights_from_tensor"] * 2,
        "end_weight_update",
    ]
    resume = "resume_memory_occupation"
    updated = [resume, "model_info", *update, "model_info", "continue_generation"]
    assert told() == updated  # that of the cache is not back yet: a trainer may have weights there
    check_serves(tiny_llama(1))
    assert told()[len(updated)] == resume


def with_fault(tensors, fault):
    name, tensor = tensors[3]
    if fault == "unknown":
        tensors[3] = ("model.layers.9.mlp.up_proj.weight", tensor)
    elif fault == "misshapen":
        tensors[3] = (name, tensor[:-1])
    elif fault == "duplicate":
        tensors.insert(5, tensors[3])  # in the next bucket
    elif fault == "missing":
        tensors.pop(3)
    elif fault == "dtype":
        tensors[3] = (name, tensor.bfloat16())
    return tensors


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("unknown", r"layers\.9\.mlp\.up_proj\.weight: the engine's model has no such tensor"),
        ("misshapen", r"v_proj\.weight: found shape"),
        ("duplicate", r"v_proj\.weight: sent twice"),
        ("missing", r"1 of 21 tensors were not sent: .*v_proj\.weight"),
        ("dtype", r"v_proj\.weight: found dtype bfloat16"),
    ],
)
def test_a_wrong_tensor_is_named_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, fault, named, transport
):
    with pytest.raises(WeightSyncError, match=named):
        update(serving, with_fault(tensors_of(tiny_llama(1)), fault), "bad", transport=transport)
    check_serves(model)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("unknown", r"layers\.9\.mlp\.up_proj\.weight: the engine's model has no such tensor"),
        ("misshapen", r"v_proj\.weight: found shape"),
        ("dtype", r"v_proj\.weight: found dtype bfloat16"),
    ],
)
def test_a_wrong_tensor_in_the_first_bucket_of_ranks_is_named_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, fault, named
):
    before = serving.run(serving.engine.model_info())["weight_version"]
    with pytest.raises(WeightSyncError, match=named):
        update(serving, with_fault(tensors_of(tiny_llama(1)), fault), "bad", transport="nccl")
    check_serves(model)
    assert serving.run(serving.engine.model_info())["weight_version"] == before


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_bytes_that_change_on_their_way_are_named_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, transport
):
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(WeightSyncError, match=r"down_proj\.weight: the bytes that arrived are not those"):
        update(serving, tensors_of(tiny_llama(1)), "bad", transport=transport, corrupt=name)
    check_serves(model)


def test_shared_memory_that_changes_is_noticed_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves
):
    def damage():
        (path,) = serving.staging.glob("*/weights.bin")
        memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        memory[11] ^= 4

    with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight: the bytes that arrived are not those"):
        update(serving, tensors_of(tiny_llama(1)), "bad", at_end=damage)
    check_serves(model)


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_a_sender_that_fails_leaves_the_old_weights_serving(
    serving, model, tiny_llama, check_serves, transport
):
    def fail():
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        update(serving, tensors_of(tiny_llama(1)), "bad", transport=transport, at_end=fail)
    check_serves(model)


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_a_sender_that_hangs_misses_the_deadline_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, transport
):
    sender = Sender()
    sender.tensors, sender.hangs = tensors_of(tiny_llama(1)), True
    work = sync_weights(sender, serving.engine, version="late", timeout_s=1, transport=transport)
    with pytest.raises(DeadlineError, match=rf"version late by {transport}: not done after 1 s"):
        serving.run(work)
    check_serves(model)


@pytest.mark.parametrize("transport", ["distributed", "disk", "disk-delta"])
def test_a_sender_of_another_version_is_refused_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, transport
):
    def other(plan):
        return dataclasses.replace(plan, version="6")

    with pytest.raises(WeightSyncError, match="update to version 7: what arrived is version 6"):
        update(serving, tensors_of(tiny_llama(1)), "7", transport=transport, change_plan=other)
    check_serves(model)


def test_a_sender_that_does_not_know_the_secret_is_refused_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves
):
    def guess(plan):
        return dataclasses.replace(plan, channel=dataclasses.replace(plan.channel, secret="guessed"))

    with pytest.raises(WeightSyncError, match="does not know its secret, and is none of this run"):
        update(serving, tensors_of(tiny_llama(1)), "7", transport="distributed", change_plan=guess)
    check_serves(model)


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_an_update_that_was_not_agreed_on_is_refused_and_the_old_weights_serve(
    serving, model, check_serves, transport
):
    engine = serving.engine
    old = serving.run(engine.open_update(transport, "7"))
    again = serving.run(engine.open_update(transport, "7"))
    with pytest.raises(WeightSyncError, match="version 7: the engine has agreed on this version anew"):
        serving.run(engine.receive(old))
    serving.run(engine.open_update(transport, "8"))
    with pytest.raises(WeightSyncError, match="version 7: the engine has agreed on version 8"):
        serving.run(engine.receive(again))
    check_serves(model)


def test_changes_to_other_weights_are_refused_and_all_weights_follow(restored, tiny_llama, check_serves):
    sender, bases = Sender(), []
    update(restored, tensors_of(tiny_llama(1)), "1", transport="disk-delta", sender=sender)
    update(restored, tensors_of(tiny_llama(2)), "2")  # what the engine keeps is this now

    def insist(plan):
        bases.append(plan.channel.base)
        base = sender.sender._senders["disk-delta"].last.digest if len(bases) == 1 else plan.channel.base
        return dataclasses.replace(plan, channel=dataclasses.replace(plan.channel, base=base))

    update(
        restored,
        tensors_of(tiny_llama(3)),
        "3",
        transport="disk-delta",
        sender=sender,
        change_plan=insist,
    )
    assert bases[0] is not None
    assert bases[1:] == [None]
    check_serves(tiny_llama(3))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_changes_are_a_small_part_of_the_weights(restored, tiny_llama, check_serves, encoding):
    def encoded(plan):
        return dataclasses.replace(plan, channel=dataclasses.replace(plan.channel, encoding=encoding))

    how = {"transport": "disk-delta", "sender": Sender(), "change_plan": encoded}
    sender, model = how["sender"].sender, tiny_llama(1)
    update(restored, tensors_of(model), "1", **how)
    assert sender.last_bytes == sum(tensor.nbytes for _, tensor in tensors_of(model))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] += 0.5
    update(restored, tensors_of(model), "2", **how)
    assert sender.last_bytes < 64 * 4 + 100  # one row of 64 numbers
    check_serves(model)


def test_a_server_that_a_killed_run_left_in_an_update_is_joined_and_updated(
    restored, new_engine, model_path, tiny_llama, check_serves, tmp_path
):
    left = restored.engine
    address = left.url.removeprefix("http://")
    joined = new_engine(model_path, tmp_path, address=address, key=left.key, start_timeout_s=600)

    async def scenario():
        await left.pause()
        await left.control("/begin_weight_update", {})
        try:
            await joined.start()
            sender = Sender()
            sender.tensors = tensors_of(tiny_llama(1))
            await sync_weights(sender, joined, version="1", timeout_s=60)
        finally:
            await joined.close()
            await left.resume()

    restored.run(scenario())
    check_serves(tiny_llama(1))


def test_damaged_changes_are_named_and_all_weights_follow(restored, tiny_llama, check_serves):
    how = {"transport": "disk-delta", "sender": Sender()}
    model, name = tiny_llama(1), "model.layers.1.mlp.down_proj.weight"
    update(restored, tensors_of(model), "1", **how)
    with pytest.raises(WeightSyncError, match=r"down_proj\.weight: the bytes that arrived are not those"):
        update(restored, tensors_of(tiny_llama(2)), "bad", corrupt=name, **how)
    check_serves(model)
    update(restored, tensors_of(tiny_llama(3)), "2", **how)
    assert how["sender"].sender.last_bytes == sum(tensor.nbytes for _, tensor in tensors_of(model))
    check_serves(tiny_llama(3))


def test_of_folders_only_the_one_that_is_served_stays(restored, tiny_llama):
    folder = restored.log.parent / "weights"
    for version in ("1", "2"):
        update(restored, tensors_of(tiny_llama(1)), version, transport="disk")
    assert [path.name.startswith("weight_v000002-") for path in folder.iterdir()] == [True]
    with pytest.raises(WeightSyncError):
        update(restored, tensors_of(tiny_llama(1))[1:], "3", transport="disk")
    assert [path.name.startswith("weight_v000002-") for path in folder.iterdir()] == [True]
    update(restored, tensors_of(tiny_llama(1)), "4")
    assert list(folder.iterdir()) == []


def test_a_server_that_says_another_version_afterwards_is_an_error():
    check_version({"weight_version": "7"}, "7")
    with pytest.raises(EngineError, match="version 7: the server says afterwards that it has version '6'"):
        check_version({"weight_version": "6"}, "7")


def test_tensors_that_their_family_keeps_in_float32_lie_so_among_the_others(tmp_path):
    values = {
        "w": torch.arange(3, dtype=torch.bfloat16),
        "bias": torch.tensor([1 / 3, 2.0]),
        "v": torch.ones(5, dtype=torch.bfloat16),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    staging = StagingFolder(tmp_path, specs=specs_of(shapes, dtype="bfloat16", float32=frozenset({"bias"})))
    staging.begin("1")
    staging.put(list(values.items()), {})
    staging.seal()
    found = dict(StagedTensors(tmp_path).tensors())
    assert all(
        found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in values.items()
    )
    staging.begin("2")
    with pytest.raises(WeightSyncError, match=r"bias: found dtype bfloat16; wanted float32"):
        staging.put([("bias", values["bias"].bfloat16())], {})
