"""What the engine `torch` predicts of its memory, beside the tensors that a real one holds."""

from __future__ import annotations

import math

import pytest
import torch
from slime_core.protocols.memory import Device
from slime_core.testing.memory import TINY_QWEN3, memory_question, write_config
from slime_models.family.families.qwen3 import QWEN3
from slime_torch.memory import engine_memory, engine_remedies
from slime_torch.model.decoder import Decoder


@pytest.fixture
def question(tmp_path):
    """Return a function that asks of a run with a config.json alone."""
    write_config(tmp_path)

    def ask(*flags, kind="cuda"):
        return memory_question(tmp_path, *flags, device=Device(kind=kind))

    return ask


#: Of a page of 32 tokens: two layers, and one of them once more while it grows, of keys and values, 2 heads, 4 wide, in bfloat16.
PAGE = 3 * 2 * 32 * 2 * 4 * 2


def test_a_cache_that_grew_holds_what_is_predicted():
    a = QWEN3.architecture(TINY_QWEN3)
    device = torch.device("cpu")
    model = Decoder(QWEN3, a, max_length=64, dtype=torch.bfloat16, device=device)
    cache = model.create_cache(16, dtype=torch.bfloat16)
    for length in (5, 20, 40):
        for slot in range(16):
            cache.hold(slot, length)
        cache.reserve(16)
    assert cache.nbytes <= cache.predicted_bytes(16, 40)
    # 2 pages of 32 tokens each for 16 slots, and nobody's; there are never more.
    assert cache.predicted_bytes(16, 40) == 33 * PAGE
    assert cache.predicted_bytes(10, 40) == (21 + 5) * PAGE  # a quarter more than were needed


def test_weights_and_cache_of_the_most_requests(question):
    """2,104 numbers; 8 slots of 32 tokens, a page each, and nobody's page."""
    (found,) = engine_memory(question("--torch-max-running-requests", "8"))
    assert found.parts["weights"] == 2 * 2104
    assert found.parts["KV cache"] == 9 * PAGE
    assert found.first_device == 0
    assert found.host == {}


def test_an_evaluation_may_have_the_longest_response(question):
    """Pages hold 32 tokens: one page for prompt and response of a step, two for those of an evaluation."""
    asked = "--torch-max-running-requests", "8"
    (of_a_step,) = engine_memory(question(*asked, kind="cpu"))
    (found,) = engine_memory(question(*asked, "--eval-max-response-len", "40", kind="cpu"))
    assert found.parts["KV cache"] * 9 == of_a_step.parts["KV cache"] * 17


def test_no_more_requests_are_reckoned_with_than_a_step_has(question):
    """8 prompts with 2 samples: 16 of the 64 slots; but where steps overlap there may be more."""
    for loop in "sync", "slime-core/sync":
        (found,) = engine_memory(question("--n-samples-per-prompt", "2", "--loop", loop))
        assert found.parts["KV cache"] == 17 * PAGE
    (found,) = engine_memory(question("--n-samples-per-prompt", "2", "--loop", "one-step-off"))
    assert found.parts["KV cache"] == 65 * PAGE


def test_the_cache_is_no_larger_than_it_may_be(question):
    asked = question("--torch-max-total-tokens", "100", "--torch-max-running-requests", "8")
    (found,) = engine_memory(asked)
    assert found.parts["KV cache"] == 5 * PAGE


def test_a_colocated_engine_leaves_its_weights_with_the_host(question):
    (found,) = engine_memory(question("--colocate"))
    assert found.host == {"offloaded weights": 2 * 2104}
    assert found.offloaded == 0


def test_fewer_requests_and_taking_turns_take_less(question):
    asked = question("--torch-max-running-requests", "32")
    assert [remedy.text for remedy in engine_remedies(asked)] == [
        "--torch-max-running-requests 16",
        "--torch-max-running-requests 8",
        "--colocate",
    ]
    assert [remedy.text for remedy in engine_remedies(question("--loop", "fully-async"))][-1] != "--colocate"
    assert math.isfinite(sum(remedy.slower for remedy in engine_remedies(asked)))


#: Bytes that prefilling a token works with, in bfloat16: 3 x 8 of the hidden state, 2 x 32 of qkv, and gate and up, 2 x 16.
TOKEN = 2 * (3 * 8 + 2 * 32 + 2 * 16)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--loop", "one-step-off"),
        ("--loop", "slime-core/rollout-only"),
        ("--loop", "fully-async", "--update-weights-in-flight", "keep"),
        ("--custom-generate-function-path", "slime-core/single-turn"),
        ("--torch-max-total-tokens", "256"),
    ],
)
def test_prompts_alone_are_prefilled_where_no_request_goes_on(question, flags):
    """8 requests whose prompts have 8 tokens; their logits, 8 x 32 x (2 + 4 + 4), are fewer bytes."""
    (found,) = engine_memory(question("--torch-max-running-requests", "8", *flags))
    assert found.parts["working memory"] == 8 * 8 * TOKEN


@pytest.mark.parametrize(
    "flags",
    [
        ("--loop", "fully-async"),
        ("--loop", "one-step-off", "--partial-rollout"),
        ("--partial-rollout",),
        ("--custom-generate-function-path", "multi-turn"),
        ("--torch-max-total-tokens", "224"),
    ],
)
def test_requests_that_may_go_on_are_prefilled_with_their_responses(question, flags):
    """8 requests of 8 + 24 tokens, a page of 32 each: 224 tokens are a page too few."""
    (found,) = engine_memory(question("--torch-max-running-requests", "8", *flags))
    assert found.parts["working memory"] == 8 * 32 * TOKEN


@pytest.mark.parametrize(("limit", "tokens"), [("100", 100), ("20", 32)])
def test_a_prefill_batch_has_so_many_tokens_or_one_longer_request(question, limit, tokens):
    asked = question(
        "--torch-max-running-requests", "8", "--partial-rollout", "--torch-max-prefill-tokens", limit
    )
    (found,) = engine_memory(asked)
    assert found.parts["working memory"] == tokens * TOKEN
