"""Megatron's model against transformers', and its weights against the folder they came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_megatron.importing import quiet
from slime_megatron.settings.section import MegatronSection
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint

from ..comparison import near
from ..host_copies import on_host
from ..tiny_models import FAMILIES, GLM, VOCAB

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
    "qwen2_moe": (
        "qwen2_moe",
        {name: value for name, value in EXPERTS.items() if name != "head_dim"}
        | {"shared_expert_intermediate_size": 80},
    ),
    "glm4_moe": ("glm4_moe", GLM | {"head_dim": 32}),
    "glm4_moe with groups of experts": (
        "glm4_moe",
        GLM
        | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4 without biases, other share of heads rotated": (
        "glm4",
        {
            "head_dim": 32,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3 with qk-norm and wide heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", autouse=True)
def world(megatron):
    from slime_megatron.parallel.process_groups import World

    world = World(MegatronSection(), seed=1)
    yield world
    world.close()


@pytest.fixture(scope="module", params=MODELS)
def pair(request, make_hf):
    """Return transformers' model, on the CPU, and ours, on the trainer's device, float32, of one folder."""
    from slime_megatron.hf.load_weights import load_weights
    from slime_megatron.model.gpt import build_model
    from slime_megatron.parallel.process_groups import device

    model_type, changes = MODELS[request.param]
    reference, folder = make_hf(model_type, **changes)
    family = FAMILIES[model_type]
    architecture = family.architecture(read_config(folder))
    with quiet():
        model = build_model(architecture, MegatronSection(), dtype=torch.float32, device=device())
    load_weights(model, HfCheckpoint(folder), family, architecture)
    return reference, model, family, architecture, folder


def logits_of(model, architecture, sequences):
    """Return our logits [t, vocab] of packed sequences, on the CPU."""
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.rope import rotary_tables
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.parallel.process_groups import device

    lengths = [len(s) for s in sequences]
    cos, sin = rotary_tables(architecture, max(lengths), dtype=torch.float32)
    packed = pack([TokenTree.of_prompt(n, ()) for n in lengths], (cos.to(device()), sin.to(device())))
    row = torch.cat(sequences)[None].to(device())
    return on_host(model(row, None, None, packed_seq_params=packed)[0])


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
    assert (found - wanted).abs().max() <= near(1e-5)


def test_packed_sequences_do_not_see_each_other(pair):
    _, model, _, architecture, _ = pair
    sequences = sequences_of(
        40, 38, 35, 19, 7, 1
    )  # two groups that are padded, and one sequence of one token
    with torch.no_grad():
        together = logits_of(model, architecture, sequences)
        alone = torch.cat([logits_of(model, architecture, [s]) for s in sequences])
    assert (together - alone).abs().max() <= near(1e-5)


def test_weights_come_out_as_they_went_in(pair):
    from slime_megatron.hf.export import hf_buckets

    _, model, family, architecture, folder = pair
    original = HfCheckpoint(folder)
    buckets = list(hf_buckets(model, family, architecture, dtype=torch.float32, bucket_bytes=50_000))
    exported = on_host(dict(pair for bucket in buckets for pair in bucket))
    assert len(buckets) > 3
    assert sum(len(bucket) for bucket in buckets) == len(exported) == len(original)
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_buckets_hold_no_more_than_their_size_or_one_tensor(pair):
    from slime_megatron.hf.export import hf_buckets

    _, model, family, architecture, _ = pair
    float32 = family.float32(architecture)
    for bucket in hf_buckets(model, family, architecture, dtype=torch.bfloat16, bucket_bytes=20_000):
        assert all((tensor.dtype == torch.float32) == (name in float32) for name, tensor in bucket)
        assert all(tensor.dtype in (torch.float32, torch.bfloat16) for _, tensor in bucket)
        assert all(tensor.is_contiguous() for _, tensor in bucket)
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 20_000
