"""Parallel layouts that tests take, and how far what they computed is from one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .batches import make_batch

TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT, EXPERT = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SEQUENCE, SHARED_STATE = {"sequence_parallel": True}, {"use_distributed_optimizer": True, "optimizer": "adam"}
#: AdamW whose state each rank has whole.
WHOLE_STATE = {"use_distributed_optimizer": False, "optimizer": "adam"}
#: Gradients in several buckets, added up during the backward pass, as is done on CUDA.
BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": "20000"}
#: Kinds of models without experts.
DENSE = ("gemma3_text", "glm", "glm4", "llama", "mimo", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text")
#: Kinds of models whose layers are those of others.
ALIKE = (
    *("deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "llama", "qwen2"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
)
#: Kinds of models whose experts tensor parallelism does not cut.
WHOLE_EXPERTS = ("gpt_oss",)
#: Kinds of models that context parallelism does not cut.
WHOLE_SEQUENCES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
#: AdamW whose epsilon exceeds all gradients is descent, too: lr / epsilon as large as the others' rate.
DESCENT = {"lr": 5e2, "adam_eps": 1e4}
#: Name -> ranks, Megatron's settings. Where both kinds of model have it, that of experts adds SEQUENCE to TENSOR.
LAYOUTS = {
    "TP2": (2, TENSOR),
    "TP2+SP": (2, TENSOR | SEQUENCE),
    "PP2": (2, PIPELINE),
    "CP2": (2, CONTEXT),
    "DP2": (2, {}),
    "DP2+distributed optimizer": (2, SHARED_STATE),
    "EP2": (2, EXPERT),
    "TP2xPP2": (4, TENSOR | PIPELINE),
    "TP2xEP2xSP": (2, TENSOR | EXPERT | SEQUENCE | {"expert_tensor_parallel_size": 1}),
    "TP2xCP2": (4, TENSOR | CONTEXT),
    "TP2xDP2": (4, TENSOR),
    "ETP2xDP2": (4, TENSOR | {"expert_tensor_parallel_size": 2}),
    "PP2xCP2": (4, PIPELINE | CONTEXT),
    "PP2xEP2": (4, PIPELINE | EXPERT),
    "CP2xDP2+distributed optimizer": (4, CONTEXT | SHARED_STATE),
}


def settings_of(kind, layout):
    """Return (ranks, Megatron's settings) of a layout for a kind of model; None where it has no such layout."""
    n, megatron = LAYOUTS[layout]
    if "context_parallel_size" in megatron and kind in WHOLE_SEQUENCES:
        return None
    if kind in DENSE:
        return None if any(name.startswith("expert") for name in megatron) else (n, megatron)
    if kind in WHOLE_EXPERTS:
        if megatron.get("expert_tensor_parallel_size", 1) > 1:
            return None
        megatron = megatron | {"expert_tensor_parallel_size": 1}
    return n, megatron | (SEQUENCE if "TP2" in layout else {})


def largest_difference(found, wanted, *, relative):
    assert found.keys() == wanted.keys()
    return max(
        ((found[n] - wanted[n]).abs().max() / (wanted[n].abs().max() if relative else 1)).item()
        for n in wanted
    )


def with_shared_prompts():
    """Return two pairs of samples with a prompt each, and three samples alone."""
    lengths = ((5, 9), (5, 3), (4, 20), (7, 12), (7, 14), (5, 11), (6, 1))
    batch = make_batch(lengths=lengths)
    tokens = batch.tokens.copy()
    for i, first in ((1, 0), (4, 3)):
        start, n = batch.offsets[first], lengths[i][0]
        tokens[batch.offsets[i] : batch.offsets[i] + n] = tokens[start : start + n]
    return replace(batch, tokens=tokens, group_ids=np.array([0, 0, 1, 2, 2, 3, 4]))
