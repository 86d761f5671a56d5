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
    from slime_megatron.packed import pack_sequences
    from slime_megatron.rotary import rotary_tables

    lengths = [len(s) for s in sequences]
    packed = pack_sequences(lengths, rotary_tables(architecture, max(lengths), dtype=torch.float32))
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


def test_groups_cover_the_packed_row_and_pad_at_most_a_third():
    from slime_megatron.packed import pack_sequences

    lengths = [90, 80, 70, 60, 44, 44, 30, 3]
    packed = pack_sequences(lengths, (torch.zeros(90, 4), torch.zeros(90, 4)))
    assert [(g.start, g.stop, g.size, g.length) for g in packed.groups] == [
        (0, 240, 3, 90),  # 60 < 0.75 * 90
        (240, 300, 1, 60),  # 44 < 0.75 * 60
        (300, 388, 2, 44),
        (388, 418, 1, 30),
        (418, 421, 1, 3),
    ]
    assert [g.slots is None for g in packed.groups] == [False, True, True, True, True]
    assert packed.groups[0].slots[[0, 89, 90, 169, 170, 239]].tolist() == [0, 89, 90, 169, 180, 249]
