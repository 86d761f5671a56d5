"""Megatron's model against transformers', and its weights against the folder they came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime_megatron.compat import quiet
from slime_megatron.section import MegatronSection
from slime_models.checkpoint import HfCheckpoint, read_config

from .conftest import FAMILIES, GLM, VOCAB

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2 with biases": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe with gates that do not sum to 1": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", GLM | {"head_dim": 32}),
    "glm4_moe with groups of experts": (
        "glm4_moe",
        GLM
        | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
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
    float32 = family.float32(architecture)
    for bucket in hf_buckets(model, family, architecture, dtype=torch.bfloat16, bucket_bytes=20_000):
        assert all((tensor.dtype == torch.float32) == (name in float32) for name, tensor in bucket)
        assert all(tensor.dtype in (torch.float32, torch.bfloat16) for _, tensor in bucket)
        assert all(tensor.is_contiguous() for _, tensor in bucket)
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 20_000


def packed_of(*families):
    from slime_megatron.packed import Family, pack

    return pack([Family(*family) for family in families], (torch.arange(130.0)[:, None], torch.zeros(130, 1)))


def test_batches_hold_sequences_of_like_length():
    packed = packed_of(*((n, ()) for n in (44, 90, 80, 70, 60, 44, 30, 3)))
    assert [(stem.size, stem.length) for stem in packed.stems] == [
        (3, 90),  # 60 < 0.75 * 90
        (1, 60),  # 44 < 0.75 * 60
        (2, 44),
        (1, 30),
        (1, 3),
    ]
    assert packed.tails == ()
    # The row begins with a sequence of 44 tokens, which stands after 3 * 90 + 60 slots.
    assert packed.layout.slots[[0, 43, 44, 133, 134, 213, 214]].tolist() == [330, 373, 0, 89, 90, 169, 180]
    assert packed_of((44, ()), (44, ())).layout is None


def test_shared_prompt_stands_once_and_its_continuations_after_it():
    """Prompt 0 1, continuations 2 3 and 4; a lone sequence 5 6 7; a prompt 8 9 with one continuation 10."""
    from slime_megatron.packed import Stems, Tails

    packed = packed_of((2, (2, 1)), (3, ()), (2, (1,)))
    assert packed.cos.flatten().tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 0, 1, 2]  # positions
    assert packed.stems == (Stems(size=2, length=3), Stems(size=1, length=2))
    assert packed.tails == (Tails(stems=1, first=0, prompts=1, prompt_length=2, size=2, length=2),)
    assert packed.layout.tokens.tolist() == [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 0]
    assert packed.layout.slots.tolist() == [6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5]
    assert (packed.n_tokens, packed.n_slots) == (11, 12)


def test_prompts_of_one_length_with_as_many_continuations_go_together():
    from slime_megatron.packed import Stems, Tails

    packed = packed_of((30, (4, 2)), (30, (3, 3, 1)), (28, (2, 2)), (30, (1, 5)), (30, (90, 2)), (30, (0, 0)))
    assert packed.stems == (Stems(size=6, length=30),)
    assert packed.tails == (
        Tails(stems=0, first=1, prompts=1, prompt_length=30, size=3, length=3),
        Tails(stems=0, first=2, prompts=2, prompt_length=30, size=2, length=5),
        Tails(stems=0, first=4, prompts=1, prompt_length=30, size=1, length=90),  # 32 < 0.75 * 120
        Tails(stems=0, first=4, prompts=1, prompt_length=30, size=1, length=2),
        Tails(stems=0, first=5, prompts=1, prompt_length=28, size=2, length=2),
    )


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_over_shared_prompts_is_that_over_copies(groups):
    """Output and gradients, float64, against each sequence by itself through an explicit softmax."""
    from slime_megatron.attention import PackedAttention
    from slime_megatron.packed import Family

    families = [(5, (3, 1, 40, 3)), (2, ()), (4, (2,)), (5, (1, 2, 2, 39)), (3, (0, 0)), (1, (7, 6))]
    packed = packed_of(*families)
    t = packed.n_tokens
    packed.cos, packed.sin = (
        torch.ones(t, 1, 8, dtype=torch.float64),
        torch.zeros(t, 1, 8, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = (
        torch.randn(t, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (3, groups, groups, 3)
    )
    config = SimpleNamespace(attention_dropout=0.0, window_size=None)
    found = PackedAttention(config)(q, k, v, None, packed_seq_params=packed).view(t, 3, 8)

    wanted = torch.zeros(t, 3, 8, dtype=torch.float64)
    start = 0
    for family in (Family(*family) for family in families):
        prompt = list(range(start, start + family.prompt))
        start += family.prompt
        for n in family.continuations or (0,):
            rows = torch.tensor(prompt + list(range(start, start + n)))
            start += n
            keys, values = (x[rows].repeat_interleave(3 // groups, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / 8**0.5
            future = torch.ones(len(rows), len(rows)).triu(1).bool()
            probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
            wanted = wanted.index_copy(0, rows, torch.einsum("hqk,khd->qhd", probabilities, values))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
