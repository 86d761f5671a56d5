"""Megatron's model against transformers', and its weights against the folder they came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_megatron.compat import quiet
from slime_megatron.section import MegatronSection
from slime_models.checkpoint import HfCheckpoint, read_config

from .conftest import FAMILIES, VOCAB

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2 with biases": ("qwen2", {}),
    "qwen3 with qk-norm and wide heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", autouse=True)
def world(megatron):
    from slime_megatron.world import World

    world = World(MegatronSection(), seed=1)
    yield world
    world.close()


@pytest.fixture(scope="module", params=MODELS)
def pair(request, make_hf):
    """Return transformers' model and ours, float32, of one folder."""
    from slime_megatron.model import build_model, load_weights

    model_type, changes = MODELS[request.param]
    reference, folder = make_hf(model_type, **changes)
    family = FAMILIES[model_type]
    architecture = family.architecture(read_config(folder))
    with quiet():
        model = build_model(architecture, MegatronSection(), dtype=torch.float32, device=torch.device("cpu"))
    load_weights(model, HfCheckpoint(folder), family, architecture)
    return reference, model, family, architecture, folder


def logits_of(model, architecture, sequences):
    """Return our logits [t, vocab] of packed sequences."""
    from slime_megatron.packed import Family, pack
    from slime_megatron.rotary import rotary_tables

    lengths = [len(s) for s in sequences]
    packed = pack(
        [Family(n, ()) for n in lengths], rotary_tables(architecture, max(lengths), dtype=torch.float32)
    )
    return model(torch.cat(sequences)[None], None, None, packed_seq_params=packed)[0]


def sequences_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def test_logits_are_those_of_transformers(pair):
    reference, model, _, architecture, _ = pair
    (tokens,) = sequences_of(61)
    with torch.no_grad():
        wanted = reference(tokens[None]).logits[0]
        found = logits_of(model, architecture, [tokens])
    assert wanted.abs().max() > 3  # the comparison is not of zeros
    assert (found - wanted).abs().max() <= 1e-5


def test_packed_sequences_do_not_see_each_other(pair):
    _, model, _, architecture, _ = pair
    sequences = sequences_of(
        40, 38, 35, 19, 7, 1
    )  # two groups that are padded, and one sequence of one token
    with torch.no_grad():
        together = logits_of(model, architecture, sequences)
        alone = torch.cat([logits_of(model, architecture, [s]) for s in sequences])
    assert (together - alone).abs().max() <= 1e-5


def test_weights_come_out_as_they_went_in(pair):
    from slime_megatron.export import hf_buckets

    _, model, family, architecture, folder = pair
    original = HfCheckpoint(folder)
    buckets = list(hf_buckets(model, family, architecture, dtype=torch.float32, bucket_bytes=50_000))
    exported = dict(pair for bucket in buckets for pair in bucket)
    assert len(buckets) > 3
    assert sum(len(bucket) for bucket in buckets) == len(exported) == len(original)
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_buckets_hold_no_more_than_their_size_or_one_tensor(pair):
    from slime_megatron.export import hf_buckets

    _, model, family, architecture, _ = pair
    for bucket in hf_buckets(model, family, architecture, dtype=torch.bfloat16, bucket_bytes=20_000):
        assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for _, tensor in bucket)
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 20_000


def packed_of(*families):
    from slime_megatron.packed import Family, pack

    return pack([Family(*family) for family in families], (torch.arange(90.0)[:, None], torch.zeros(90, 1)))


def test_groups_hold_sequences_of_like_length():
    packed = packed_of(*((n, ()) for n in (90, 80, 70, 60, 44, 44, 30, 3)))
    assert [(g.start, g.stop, g.size, g.length) for g in packed.groups] == [
        (0, 270, 3, 90),  # 60 < 0.75 * 90
        (270, 330, 1, 60),  # 44 < 0.75 * 60
        (330, 418, 2, 44),
        (418, 448, 1, 30),
        (448, 451, 1, 3),
    ]
    assert packed.layout.slots[[0, 89, 90, 169, 170, 239, 240]].tolist() == [0, 89, 90, 169, 180, 249, 270]
    assert len(packed.layout.copied) == 0
    assert packed_of((44, ()), (44, ())).layout is None


def test_shared_prompt_goes_into_every_sequence_of_its_family():
    """Prompt 0 1, continuations 2 3 and 4; and a lone sequence 5 6 7."""
    packed = packed_of((2, (2, 1)), (3, ()))
    assert packed.cos.flatten().tolist() == [0, 1, 2, 3, 2, 0, 1, 2]  # positions
    assert [(g.size, g.length) for g in packed.groups] == [(3, 4)]
    assert packed.layout.tokens.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 5, 6, 7, 0]
    assert packed.layout.slots.tolist() == [0, 1, 2, 3, 6, 8, 9, 10]
    assert packed.layout.copied.tolist() == [0, 1]
    assert packed.layout.copies.tolist() == [[4], [5]]
    assert (packed.n_tokens, packed.n_attended, packed.n_slots) == (8, 10, 12)


def test_gradient_of_a_shared_token_is_the_sum_over_its_slots():
    from slime_megatron.attention import _Collect, _Spread

    layout = packed_of((2, (2, 1, 5)), (3, ()), (1, (4, 4))).layout
    x = torch.randn(len(layout.slots), 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _Spread.apply(x, layout)[layout.slots.unique()], x)
    weights = torch.randn(len(layout.tokens), 3, 2, dtype=torch.float64)
    real = torch.zeros(len(layout.tokens), 1, 1, dtype=torch.float64)
    real[layout.slots] = 1
    real[layout.copies[layout.is_copy]] = 1
    (found,) = torch.autograd.grad((_Spread.apply(x, layout) * weights * real).sum(), x)
    (wanted,) = torch.autograd.grad((x[layout.tokens] * weights * real).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(_Collect.apply(_Spread.apply(x, layout), layout.slots), x)
