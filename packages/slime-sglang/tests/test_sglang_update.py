"""Weight updates of a real server: what it then serves, and what is refused with the old weights still serving."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import SamplingParams
from slime_core.weights import sync_weights
from slime_models.fingerprint import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


class Sender:
    """The sending half of a trainer."""

    transports = ("memory",)

    def __init__(self, tensors, *, damage=None):
        self.tensors, self.damage = list(tensors), damage

    async def send(self, plan):
        for start in range(0, len(self.tensors), 5):
            await plan.channel.put(self.tensors[start : start + 5])
        if self.damage is not None:
            self.damage()
        await plan.channel.end()
        return {name: fingerprint(tensor) for name, tensor in self.tensors}


def tensors_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def update(serving, sender: Sender, version: str):
    serving.run(sync_weights(sender, serving.engine, version=version, timeout_s=60))


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
    update(serving, Sender(tensors_of(model)), "back")


def test_after_twenty_updates_the_server_is_the_newest_model(restored, tiny_llama, check_serves):
    models = [tiny_llama(seed) for seed in (1, 2, 3)]
    for number in range(20):
        update(restored, Sender(tensors_of(models[number % 3])), str(number))
    check_serves(models[19 % 3])
    answer = restored.run(restored.engine.generate(PROMPT, GREEDY))
    assert answer.weight_version == "19"


def test_requests_under_way_go_on_with_the_new_weights(
    restored, model, tiny_llama, log_probs_of, eos, starting_gun
):
    params = SamplingParams(max_new_tokens=240, min_new_tokens=240, temperature=0)

    async def scenario():
        task = asyncio.ensure_future(restored.engine.generate(PROMPT, params))
        await starting_gun(restored.engine)
        await sync_weights(Sender(tensors_of(tiny_llama(1))), restored.engine, version="mid", timeout_s=60)
        return await task

    answer = restored.run(scenario())
    spans = answer.metadata["weight_versions"]
    assert [span["version"] for span in spans][-1] == "mid"
    begin = spans[-1]["start"]
    assert 0 < begin < 240
    _, old = log_probs_of(model, PROMPT, answer.tokens)
    _, new = log_probs_of(tiny_llama(1), PROMPT, answer.tokens)
    for span, likeliest in ((slice(0, begin - 1), old), (slice(begin + 1, None), new)):
        pairs = zip(answer.tokens[span], likeliest[span], strict=True)
        assert all(
            token == wanted for token, wanted in pairs if wanted != eos
        )  # which min_new_tokens forbids


def with_fault(tensors, fault):
    name, tensor = tensors[3]
    if fault == "unknown":
        tensors[3] = ("model.layers.9.mlp.up_proj.weight", tensor)
    elif fault == "misshapen":
        tensors[3] = (name, tensor[:-1])
    elif fault == "duplicate":
        tensors.insert(0, tensors[3])
    elif fault == "missing":
        tensors.pop(3)
    elif fault == "dtype":
        tensors[3] = (name, tensor.bfloat16())
    return tensors


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("unknown", r"layers\.9\.mlp\.up_proj\.weight: the engine's model has no such tensor"),
        ("misshapen", r"v_proj\.weight: found shape"),
        ("duplicate", r"v_proj\.weight: sent twice"),
        ("missing", r"1 of 21 tensors were not sent: .*v_proj\.weight"),
        ("dtype", r"v_proj\.weight: found dtype torch\.bfloat16"),
    ],
)
def test_a_wrong_tensor_is_named_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves, fault, named
):
    with pytest.raises(WeightSyncError, match=named):
        update(serving, Sender(with_fault(tensors_of(tiny_llama(1)), fault)), "bad")
    check_serves(model)


def test_bytes_that_change_on_their_way_are_named_and_the_old_weights_serve(
    serving, model, tiny_llama, check_serves
):
    def damage():
        (path,) = serving.staging.glob("*/weights.bin")
        memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        memory[11] ^= 4

    with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight: the bytes that arrived are not those"):
        update(serving, Sender(tensors_of(tiny_llama(1)), damage=damage), "bad")
    check_serves(model)


def test_a_sender_that_fails_leaves_the_old_weights_serving(serving, model, tiny_llama, check_serves):
    def damage():
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        update(serving, Sender(tensors_of(tiny_llama(1)), damage=damage), "bad")
    check_serves(model)
