"""Attention to prompts as CUDA computes it, by one call over lengths, with a slow loop in the kernel's place: against what a CPU computes."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from slime_models.testing.variable_lengths import looped
from slime_torch.layers.attention import GroupedQueries, GroupedQueryAttention
from slime_torch.layers.standard import standard_layer
from slime_torch.layers.torch_attention import TorchAttention
from slime_torch.model.decoder import Decoder
from slime_torch.model.family_decoder import FamilyDecoder
from torch.nn.attention import varlen

from ..conftest import CONFIGS, FAMILIES, VOCAB

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7], [1, 8, 2, 8, 1, 8, 2]]


def states(model):
    """Hidden states after prompts and three tokens more each, two of which share pages."""
    cache = model.create_cache(4, page_len=4)
    for slot in (0, 1):
        cache.hold(slot, 9)
    cache.release(0)  # so that pages are in no order
    cache.release(1)
    for slot, prompt in enumerate(PROMPTS):
        cache.hold(slot, len(prompt) + 4)
    page = cache.share(0, 3, len(PROMPTS[0]))
    cache.hold(3, len(PROMPTS[0]) + 4)
    cache.reserve(4)
    with torch.inference_mode():
        found = [model.prefill(PROMPTS, [0, 1, 2], cache)]
        cache.copy(0, 3, page)
        lengths = torch.tensor([len(PROMPTS[slot]) for slot in (0, 1, 2, 0)], device=model.device)
        for number in range(3):
            tokens = (torch.tensor([7, 8, 9, 10]) + number).to(model.device)
            found.append(model.decode(tokens % VOCAB, lengths + number, cache))
    return torch.cat(found)


def layers(builder):
    """Every other layer sees five tokens alone, and scores have a factor of their own."""
    kinds = [GroupedQueries(builder, window=window, scale=0.3) for window in (5, None)]
    return [
        standard_layer(
            builder,
            number,
            GroupedQueryAttention(builder, f"{builder.layer_prefix(number)}self_attn.", kinds[number % 2]),
        )
        for number in range(builder.architecture.num_layers)
    ]


WINDOWS = FamilyDecoder(layers=layers)


def decoder(kind, device=CPU, *, with_kernels=False):
    if kind == "windows":
        family, config = (
            dataclasses.replace(FAMILIES["llama"], decoder=f"{__name__}:WINDOWS"),
            CONFIGS["llama"](),
        )
    else:
        family, config = FAMILIES[kind], CONFIGS[kind]()
    architecture = family.architecture(config.to_dict() | {"model_type": family.model_type})
    model = Decoder(
        family, architecture, max_length=64, dtype=torch.float32, device=device, with_kernels=with_kernels
    )
    generator = torch.Generator().manual_seed(0)
    shapes = model.weights.shapes()
    model.weights.load(
        {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    )
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "glm4", "qwen3_next", "windows"])
def test_one_call_for_all_prompts_gives_what_batches_of_one_length_give(kind):
    """Heads that share keys, norms of heads, part of a head rotated, other kinds of layers beside, windows."""
    model, calls = decoder(kind), mock.Mock(side_effect=looped)
    wanted = states(model)
    with (
        mock.patch.object(TorchAttention, "computes_at_once", lambda *_: True),
        mock.patch.object(varlen, "varlen_attn", calls),
    ):
        found = states(model)
    assert calls.called
    assert wanted.shape == (3 + 3 * 4, model.architecture.hidden_size)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
