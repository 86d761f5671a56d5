"""What the engine `torch` predicts of its memory, beside the tensors that a real one holds."""

from __future__ import annotations

import math

import pytest
import torch
from slime_core.protocols.memory import Device
from slime_core.testing.memory import TINY_QWEN3, memory_question, write_config
from slime_models.family.families.qwen3 import QWEN3
from slime_torch.memory import engine_memory, engine_remedies
from slime_torch.storage.cache import KvCache


@pytest.fixture
def question(tmp_path):
    """Return a function that asks of a run with a config.json alone."""
    write_config(tmp_path)

    def ask(*flags, kind="cuda"):
        return memory_question(tmp_path, *flags, device=Device(kind=kind))

    return ask


def test_a_cache_that_grew_holds_what_is_predicted():
    architecture = QWEN3.architecture(TINY_QWEN3)
    a = architecture
    cache = KvCache(
        a.num_layers,
        heads=a.num_query_groups,
        dim=a.head_dim,
        max_slots=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for length in (5, 20, 40):
        cache.reserve(16, length)
    assert cache.nbytes <= cache.predicted_bytes(16, 40)
    # Two layers and, once it has grown, the spare: keys and values of 16 slots, 2 heads, 48 positions (40 and a sixteenth more,
    # in sixteens), 4 wide.
    assert cache.predicted_bytes(16, 40) == 3 * 2 * 16 * 2 * 48 * 4 * 2


def test_weights_and_cache_of_the_most_requests(question):
    """2,104 numbers; 8 slots of 32 tokens and a sixteenth more, in sixteens: 48."""
    (found,) = engine_memory(question("--torch-max-running-requests", "8"))
    assert found.parts["weights"] == 2 * 2104
    assert found.parts["KV cache"] == 3 * 2 * 8 * 2 * 48 * 4 * 2
    assert found.first_device == 0
    assert found.host == {}


def test_an_evaluation_may_have_the_longest_response(question):
    (found,) = engine_memory(question("--torch-max-running-requests", "8", "--eval-max-response-len", "40"))
    assert found.parts["KV cache"] == 3 * 2 * 8 * 2 * 64 * 4 * 2


def test_no_more_requests_are_reckoned_with_than_a_step_has(question):
    """8 prompts with 2 samples: 16 of the 64 slots; but where steps overlap there may be more."""
    (found,) = engine_memory(question("--n-samples-per-prompt", "2"))
    assert found.parts["KV cache"] == 3 * 2 * 16 * 2 * 48 * 4 * 2
    (found,) = engine_memory(question("--n-samples-per-prompt", "2", "--loop", "one-step-off"))
    assert found.parts["KV cache"] == 3 * 2 * 64 * 2 * 48 * 4 * 2


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
