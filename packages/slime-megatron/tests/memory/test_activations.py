"""What a micro-batch keeps: worked out by hand, and as torch's autograd saves it in real layers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from slime_core.testing.memory import TINY_QWEN3
from slime_megatron.batch.bin_packing import pack_micro_batches
from slime_megatron.memory.activations import activations_of_stage, forward_of_stage, in_flight, layer_bytes
from slime_megatron.memory.family_memory import memory_of
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape, micro_batch_tokens
from slime_megatron.settings.section import MegatronSection
from slime_models.cpu import attends_in_bfloat16
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE

from ..batches import make_batch
from ..tiny_models import DEEPSEEK
from .test_parameters import EXPERTS

DENSE, MOE = QWEN3.architecture(TINY_QWEN3), QWEN3_MOE.architecture(EXPERTS)
ONE = Layout(ranks=1)


def shape(**changes):
    return MicroBatchShape(**{"tokens": 1, "dtype_bytes": 2, "device": "cuda"} | changes)


def test_a_dense_layer_on_cuda_by_hand():
    """Hidden 8, queries 16, keys and values 8 wide, 4 and 2 heads, MLP 16; bfloat16."""
    norms = 2 * (2 * 8 + 4)  # input, and a float32 scale
    inputs = 2 * (2 * 8)  # of the projections to queries, keys and values, and to the MLP
    query_norm, key_norm = 2 * 16 + 4 * 4, 4 * 2  # the keys are part of the fused projection, which is kept
    # q, k, a copy of v, the fused projection, output, log-normalisers
    attention = 2 * (16 + 8 + 8) + 2 * (16 + 8 + 8) + 2 * 16 + 4 * 4
    mlp = 2 * (2 * 16 + 16)  # gate and up, the product
    assert (
        layer_bytes(DENSE, ONE, shape(), layer=0) == norms + inputs + query_norm + key_norm + attention + mlp
    )


def test_on_cuda_float32_has_keys_and_values_of_all_heads():
    """Twice the bytes of all but the float32 scales and log-normalisers; and keys and values are 16 wide, and not 8."""
    scales = 2 * 4 + 4 * 4 + 4 * 2 + 4 * 4
    in_bfloat16 = layer_bytes(DENSE, ONE, shape(), layer=0)
    in_float32 = layer_bytes(DENSE, ONE, shape(dtype_bytes=4), layer=0)
    assert in_float32 == 2 * (in_bfloat16 - scales) + scales + 4 * 2 * (16 - 8)


def test_sequence_parallelism_cuts_what_tensor_parallelism_leaves_whole():
    two = Layout(ranks=2, tensor=2)
    whole, cut, with_rows_cut = (
        layer_bytes(DENSE, layout, shape(tokens=4), layer=0)
        for layout in (ONE, two, Layout(ranks=2, tensor=2, sequence=True))
    )
    rows = 2 * (2 * 8 + 4) + 2 * (2 * 8)
    assert cut == (whole - 4 * rows) // 2 + 4 * rows
    assert with_rows_cut == whole // 2


def test_a_layer_with_experts_on_cuda_by_hand():
    """A token passes 2 of 4 experts, each 4 wide."""
    mlp = 2 * (2 * 16 + 16)
    routes = 2 * (
        8 + 4 + 2 * 8 + 4
    )  # chosen experts, their gates, where rows go and which gate they have, the gates of rows
    # The row, and inside the expert: gate and up, and their product with the gate of the route.
    each = 2 * 8 + 2 * (2 * 4 + 4)
    dense = layer_bytes(DENSE, ONE, shape(), layer=0)
    assert layer_bytes(MOE, ONE, shape(), layer=0) == dense - mlp + routes + 2 * each


def test_full_recomputation_keeps_a_row_a_layer_and_works_with_one_layer():
    kept = activations_of_stage(DENSE, ONE, shape(tokens=10), stage=0, in_flight=1)
    again = activations_of_stage(DENSE, ONE, shape(tokens=10, recompute="full"), stage=0, in_flight=1)
    layer = layer_bytes(DENSE, ONE, shape(tokens=10), layer=0)
    assert kept.kept == 2 * layer
    assert again.kept == 2 * 10 * 2 * 8
    assert again.working >= layer


@pytest.mark.parametrize(
    ("method", "n", "rows", "whole", "at_once"),
    [("uniform", 1, 2, 0, 1), ("uniform", 2, 1, 0, 2), ("block", 1, 1, 1, 1), ("block", 2, 2, 0, 1)],
)
def test_layers_are_recomputed_in_groups_or_the_first_of_them_alone(method, n, rows, whole, at_once):
    """Of two layers, of 10 tokens, with rows of 8 numbers of 2 bytes."""
    layer = layer_bytes(DENSE, ONE, shape(tokens=10), layer=0)
    by_one, found = (
        activations_of_stage(DENSE, ONE, shape(tokens=10, recompute="full", **how), stage=0, in_flight=1)
        for how in ({}, {"recompute_method": method, "recomputed_layers": n})
    )
    assert found.kept == rows * 10 * 2 * 8 + whole * layer
    assert found.working == by_one.working + (at_once - 1) * layer


def test_the_first_stage_holds_a_micro_batch_for_each_stage():
    layout = Layout(ranks=4, pipeline=2)
    assert [in_flight(layout, stage) for stage in range(2)] == [2, 1]
    first, last = (
        activations_of_stage(DENSE, layout, shape(), stage=stage, in_flight=in_flight(layout, stage))
        for stage in range(2)
    )
    assert first.kept == 2 * last.kept


def test_logits_are_held_for_a_chunk_of_tokens_at_once():
    """100 tokens, 32 ids; the final norm and the rows that predict are kept, then come logits, their gradient's chunk in float32,
    the gradients of hidden states and of the output layer, the latter in float32 where there are several chunks."""
    final = 100 * (2 * 8 + 4) + 100 * 2 * 8
    for chunk, weight in ((100, 2 * 32 * 8), (10, (2 + 4) * 32 * 8)):
        found = activations_of_stage(DENSE, ONE, shape(tokens=100, logits_tokens=chunk), stage=0, in_flight=1)
        logits = chunk * 32 * 2 + chunk * 32 * 4
        assert found.working == max(final + logits + 100 * 2 * 8 + weight, 100 * (4 * 2 * 16 + 4 * 2 * 8))


def test_products_through_float32_have_logits_and_the_output_layer_once_more():
    """100 tokens, 4,096 ids: the gradients of a chunk's logits, in float32, and the matrix or its gradient; sums of chunks beside them.

    By then the logits in float32 are gone, and the gradient in bfloat16 is still to come.
    """
    wide = dataclasses.replace(DENSE, vocab_size=4096)
    kept = 100 * (2 * 8 + 4) + 100 * 2 * 8
    for chunk, sums in ((100, 0), (10, 4096 * 8 * 4)):
        asked = shape(tokens=100, logits_tokens=chunk, device="cpu", multiplies_in_float32=True)
        products = 4 * 4096 * chunk + 4 * 4096 * 8
        found = activations_of_stage(wide, ONE, asked, stage=0, in_flight=1)
        assert found.working == kept + 2 * 4096 * chunk + 2 * 100 * 8 + products + sums
        assert forward_of_stage(wide, ONE, asked, stage=0) == kept + 2 * 4096 * chunk + products + 2 * 100 * 8


@pytest.mark.parametrize(
    ("lengths", "budget", "most"), [([30, 40, 20], 100, 100), ([300, 10], 100, 300), ([30, 30], 1000, 60)]
)
def test_no_micro_batch_exceeds_the_tokens_that_are_reckoned_with(lengths, budget, most):
    reckoned = micro_batch_tokens(
        max_tokens_per_gpu=budget, longest_sample=max(lengths), samples_per_rank=len(lengths), layout=ONE
    )
    assert reckoned == most
    assert max(sum(lengths[i] for i in each) for each in pack_micro_batches(lengths, budget)) <= reckoned


SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False}
MODELS = {
    "qwen3": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "deepseek_v3": {**DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 2},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_5_text": {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
        "linear_value_head_dim": 20,
    },
}  # fmt: skip


#: How near what is reckoned is to what is saved. On CUDA kernels keep something besides, such as ends of sequences, and fill
#: log-normalisers up.
EXACT = {"cpu": {"abs": 64}, "cuda": {"rel": 0.1}}  # numbers of calls, such as a mask's kind
ABOUT = {"cpu": 0.05, "cuda": 0.15}


def kept(make_hf, make_learner, model, length, *, bf16, flags=None, **changes):
    """Return what is reckoned of the second layer of a model, and what it saves, of two samples of one length, and the device."""
    from slime_megatron.parallel.process_groups import device

    _, folder = make_hf(model, **SIZES | MODELS[model] | changes)
    learner = make_learner(folder=folder, megatron=MegatronSection(**flags or {}), bf16=bf16)
    saved = _saved_bytes(learner, make_batch(lengths=((5, length - 4),) * 2))
    wanted = MicroBatchShape(
        tokens=2 * length,
        dtype_bytes=2 if bf16 else 4,
        device=device().type,
        attends_in_float32=bf16 and device().type == "cpu" and (length < 512 or not attends_in_bfloat16()),
        recompute=(flags or {}).get("recompute_granularity"),
    )
    memory = memory_of(learner._settings.family)
    return layer_bytes(learner._architecture, ONE, wanted, layer=1, memory=memory), saved, device().type


@pytest.mark.parametrize(
    ("model", "bf16", "flags"),
    [
        ("qwen3", False, {}),
        ("qwen3", True, {}),
        ("qwen3", True, {"recompute_granularity": "selective"}),
        ("glm4", False, {}),
        ("glm4", True, {}),
        ("deepseek_v3", False, {}),
        ("deepseek_v3", True, {}),
        ("deepseek_v3", True, {"recompute_granularity": "selective"}),
    ],
)
@pytest.mark.parametrize("length", [40, 600])
def test_a_layer_keeps_the_bytes_that_autograd_saves(make_hf, make_learner, model, bf16, flags, length):
    """The storages that the second layer saves for its backward pass, each counted once."""
    predicted, saved, device = kept(make_hf, make_learner, model, length, bf16=bf16, flags=flags)
    assert predicted == pytest.approx(saved, **EXACT[device])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen2_moe", {}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
        ("gpt_oss", {}),
        ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"]}),
        ("qwen3_5_text", {"layer_types": ["full_attention", "full_attention"]}),
    ],
)
def test_layers_of_experts_or_delta_nets_keep_about_what_is_reckoned(
    make_hf, make_learner, model, bf16, changes
):
    """Within a twentieth on a CPU, of two samples of 600 tokens: how experts' rows are filled up depends on their number, as a delta net's
    last chunk does on the length."""
    predicted, saved, device = kept(make_hf, make_learner, model, 600, bf16=bf16, **changes)
    assert predicted == pytest.approx(saved, rel=ABOUT[device])


def _saved_bytes(learner: Any, batch: Any) -> int:
    """Return the bytes of the storages that the model's second layer saves."""
    layer: list[int] = []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    held: dict[int, torch.Tensor] = {}
    found: Counter[int] = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if layer and storage.data_ptr() not in parameters and storage.data_ptr() not in held:
            held[storage.data_ptr()] = tensor  # kept, so that no other storage gets its address
            found[layer[-1]] += storage.nbytes()
        return tensor

    modules = [*learner.model.decoder.layers, learner.model.decoder.final_layernorm]
    hooks = [
        module.register_forward_pre_hook(lambda *_, number=number: layer.append(number))
        for number, module in enumerate(modules)
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.train(batch)
    for hook in hooks:
        hook.remove()
    return found[1]
