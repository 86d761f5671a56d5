"""The decoder over tensors of the device cuda that have no data: needs no GPU, and computes nothing.

A tensor on another device, or a value that the host asks for, is an error there.
"""

from __future__ import annotations

import pytest
import torch
from slime_models.family.families.latent_attention.rules import LatentArchitecture
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device
from slime_torch.model.decoder import Decoder

from ..conftest import CONFIGS, FAMILIES, VOCAB


def decoder(kind):
    family = FAMILIES[kind.partition("-")[0]]
    architecture = family.architecture(CONFIGS[kind]().to_dict() | {"model_type": family.model_type})
    return Decoder(family, architecture, max_length=64, dtype=torch.bfloat16, device=CUDA)


def calls(counted):
    """Calls of the kernels for prompts of any lengths, for padded batches, and for pages."""
    of_prompts, of_pages = map(
        counted.operations.count, ("torch_attn::_varlen_attn", "slime_torch::attend_pages")
    )
    return of_prompts, len(counted.attention), of_pages


def cache_of(model):
    """Room for three requests of 20 tokens."""
    cache = model.create_cache(8)
    for slot in range(3):
        cache.hold(slot, 20)
    cache.reserve(3)
    return cache


@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_and_decoding_stay_on_the_device(kind):
    with cuda_without_device() as counted:
        model = decoder(kind)
        counted.waits.clear()  # rotary tables are copied once
        cache = cache_of(model)
        prefilled = model.prefill([[1] * 7, [2] * 7, [3] * 4], [0, 1, 2], cache)
        before = calls(counted)
        hidden = model.decode(
            torch.zeros(3, dtype=torch.int64, device=CUDA),
            torch.ones(3, dtype=torch.int64, device=CUDA),
            cache,
        )
        logits = model.logits(hidden)
    n_layers = model.architecture.num_layers - len(getattr(model.architecture, "linear_layers", ()))
    assert (prefilled.device.type, prefilled.shape) == ("cuda", (3, 64))
    assert (logits.device.type, logits.dtype, logits.shape) == ("cuda", torch.bfloat16, (3, VOCAB))
    n = n_layers
    if isinstance(model.architecture, LatentArchitecture):  # heads are too wide for either kernel
        assert (before, calls(counted)) == ((0, 2 * n, 0), (0, 3 * n, 0))  # prompts of two lengths; one step
    elif model.architecture.model_type == "gpt_oss":  # the first knows no sinks
        assert (before, calls(counted)) == ((0, 2 * n, 0), (0, 2 * n, n))
    else:
        assert (before, calls(counted)) == ((n, 0, 0), (n, 0, n))
    assert set(counted.attention) <= {frozenset(("flash", "efficient", "plain"))}
    assert not counted.waits


def operations(n_layers):
    config = CONFIGS["llama"]()
    config.num_hidden_layers = n_layers
    family = FAMILIES["llama"]
    architecture = family.architecture(config.to_dict())
    with cuda_without_device() as counted:
        model = Decoder(family, architecture, max_length=64, dtype=torch.bfloat16, device=CUDA)
        cache = cache_of(model)
        tokens, lengths = (torch.zeros(3, dtype=torch.int64, device=CUDA) for _ in range(2))
        before = len(counted.operations)
        model.decode(tokens, lengths, cache)
    return counted.operations[before:]


def test_operations_of_a_decode_step():
    """Each is a launch on CUDA, which takes microseconds of the host. Attention is one."""
    two, four = operations(2), operations(4)
    of_a_layer = (len(four) - len(two)) / 2
    assert of_a_layer <= 9
    assert len(two) - 2 * of_a_layer <= 7
