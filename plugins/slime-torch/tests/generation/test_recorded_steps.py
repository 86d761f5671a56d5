"""Decoding steps with rows that are nobody's: what they give, when they are made anew, and on CUDA as graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device
from slime_torch.generation import recorded_steps
from slime_torch.generation.recorded_steps import RecordedSteps, can_record
from slime_torch.generation.request import Request, StopRule
from slime_torch.generation.sampling import Draws
from slime_torch.generation.scheduler import Scheduler
from slime_torch.model.decoder import Decoder

from ..conftest import CONFIGS, FAMILIES, VOCAB, ByteTokenizer

CPU = torch.device("cpu")


def architecture_of(kind):
    family = FAMILIES[kind.partition("-")[0]]
    return family, family.architecture(CONFIGS[kind]().to_dict() | {"model_type": family.model_type})


def decoder(kind, *, device=CPU, dtype=torch.float32):
    family, architecture = architecture_of(kind)
    made = Decoder(family, architecture, max_length=128, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    shapes = made.weights.shapes()
    made.weights.load({name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()})
    return made


WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
)


def responses(model, steps=None, cache=None):
    """Responses of nine requests, six of them at a time, which end one after another."""
    cache = cache or model.create_cache(6)
    tested = Scheduler(model, cache, max_running=6, max_prefill_tokens=1000, steps=steps)
    asked = []
    for seed in range(9):
        prompt = torch.randint(VOCAB, (20 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        n = 10 + 7 * seed
        params = SamplingParams(max_new_tokens=n, min_new_tokens=n, **WAYS[seed % 4])
        asked.append(Request(prompt, params, seed=seed, stop=StopRule(params, ByteTokenizer())))
    tested.submit(asked)
    while tested.busy:
        tested.step()
    return [request.tokens for request in asked]


def next_tokens(steps, n):
    """Tokens after the first nine of n slots."""
    draws = Draws.of([SamplingParams(max_new_tokens=1)] * n, range(n), [10] * n)
    return steps.next_tokens(np.ones(n, np.int64), np.full(n, 9), draws)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_rows_that_are_nobodys_change_nothing(kind):
    model = decoder(kind)
    cache = model.create_cache(6)
    assert responses(model, RecordedSteps(model, cache, max_running=6), cache) == responses(model)


def test_rows_are_those_of_the_next_step_and_a_step_is_made_anew_where_memory_has_moved():
    model = decoder("llama")
    cache = model.create_cache(40)
    steps = RecordedSteps(model, cache, max_running=40)
    with torch.inference_mode():
        for slot in range(40):
            cache.hold(slot, 10)
        for n in (1, 2, 3, 4, 9, 16, 17, 33, 40):
            tokens, log_probs, masks = next_tokens(steps, n)
            assert (len(tokens), len(log_probs), masks) == (n, n, [None] * n)
    assert list(steps._steps) == [1, 2, 4, 16, 32, 40]
    held = steps._steps[4]
    steps.look_at_weights()  # which were written to, and lie where they did
    assert steps._steps[4] is held
    model.norm.tensor = model.norm.tensor.clone()
    steps.look_at_weights()
    assert steps._steps == {}
    with torch.inference_mode():
        next_tokens(steps, 4)
        before = cache.nbytes
        cache.free()
        cache.hold(0, 10)
        next_tokens(steps, 1)
        assert cache.nbytes == before  # so that it need not grow, and steps be recorded, again and again
        assert list(steps._steps) == [1]
        cache.hold(1, 128)
        next_tokens(steps, 2)
        assert list(steps._steps) == [1, 2]
        for slot in range(2, 40):
            cache.hold(slot, 128)
        next_tokens(steps, 40)
        assert cache.nbytes > before
        assert list(steps._steps) == [40]


def test_steps_that_cannot_be_recorded_are_computed_all_the_same(monkeypatch, caplog):
    model = decoder("llama")
    cache = model.create_cache(6)
    steps = RecordedSteps(model, cache, max_running=6)
    asked = []

    def record(_, pool):
        asked.append(pool)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded_steps._Step, "record", record)
    steps._records = True  # as where there is CUDA
    assert responses(model, steps, cache) == responses(model)
    assert len(asked) == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert "kernel by kernel: operation not permitted" in said


@pytest.mark.parametrize("kind", CONFIGS)
def test_steps_of_the_usual_attention_can_be_recorded(kind):
    """Not where attention is gathered up to the longest request, nor where states are kept in slots."""
    family, architecture = architecture_of(kind)
    with cuda_without_device():
        model = Decoder(family, architecture, max_length=64, dtype=torch.bfloat16, device=CUDA)
        found = can_record(model)
    has_others = hasattr(architecture, "linear_layers") or hasattr(architecture, "kv_lora_rank")
    assert found == (not has_others)


def test_a_step_of_pages_that_are_there_waits_for_nothing():
    with cuda_without_device() as counted, torch.inference_mode():
        family, architecture = architecture_of("llama")
        model = Decoder(family, architecture, max_length=64, dtype=torch.bfloat16, device=CUDA)
        cache = model.create_cache(8)
        cache.hold(0, 10)
        cache.reserve(8)
        step = recorded_steps._Step(model, cache, torch.empty(2, VOCAB, dtype=torch.bfloat16, device=CUDA))
        counted.operations.clear()
        counted.waits.clear()
        logits, drawn = step._compute()
    assert (logits.shape, drawn.shape) == ((2, VOCAB), (2, 2))
    assert not counted.waits
    assert "slime_torch::attend_pages" in counted.operations


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_graphs_give_what_steps_give_that_are_launched_one_by_one(kind):
    model = decoder(kind, device=CUDA, dtype=torch.bfloat16)
    cache = model.create_cache(6)
    found, wanted = responses(model, RecordedSteps(model, cache, max_running=6), cache), responses(model)
    same = [one == other for one, other in zip(found, wanted, strict=True)]
    assert sum(same) >= 7, "rows beside change a product's last bit, and with it a greedy token, now and then"
