"""A micro-batch on one rank: how many tokens it has, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_megatron.memory.layout import Layout


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """A micro-batch on one rank, and how it is computed."""

    tokens: int
    """Of the packed row, this rank's under context parallelism."""
    dtype_bytes: int
    """Of a number of the dtype that is computed in."""
    device: Literal["cpu", "cuda"]
    """What it is computed on."""
    attends_in_float32: bool = False
    """Whether attention computes in float32 whatever the dtype; see `model.layers.attention`."""
    multiplies_in_float32: bool = False
    """Whether matrix products of another dtype are made from float32 copies; see `slime_models.cpu.product`."""
    recompute: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass instead of being kept."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With `full`: the input of each `recomputed_layers` layers in a row is kept, or that of each of the first so many layers of a
    stage, and the others are not recomputed."""
    recomputed_layers: int = 1
    """How many."""
    logits_tokens: int = 4096
    """Tokens whose logits are held at once."""
    with_entropy: bool = False
    """Whether the loss reads entropies."""
    with_logits: bool = False
    """Whether it reads logits, in float32."""


def micro_batch_tokens(
    *, max_tokens_per_gpu: int, longest_sample: int, samples_per_rank: int, layout: Layout
) -> int:
    """Return the most tokens that a rank has of one micro-batch.

    Args:
        max_tokens_per_gpu: the setting; only a sample that is longer by itself exceeds it.
        longest_sample: tokens of the longest sample.
        samples_per_rank: of an optimizer step, of each data-parallel replica.
        layout: of the ranks, of which context-parallel ones share each sample.
    """
    alone = -(-longest_sample // layout.context)
    return max(alone, min(max_tokens_per_gpu, samples_per_rank * alone))
