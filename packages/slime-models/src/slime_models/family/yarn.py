"""YaRN: how rotary frequencies are stretched for a longer context. Source: arXiv 2309.00071."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """How rotary frequencies are stretched by `yarn`. Source: arXiv 2309.00071, section 3."""

    factor: float
    """Divides the low frequencies."""
    beta_fast: float
    """Turns within the original context from which frequencies are left alone."""
    beta_slow: float
    """Turns within the original context below which frequencies are divided in full."""
    truncate: bool
    """Whether the dimensions between which it goes over are whole numbers."""
    attention_factor: float
    """Multiplies cosine and sine."""
    original_max_position_embeddings: int
    """Tokens of context before the stretch."""


#: Keys of a table of rotary parameters of the kind `yarn`.
YARN_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    }
    | {"mscale", "mscale_all_dim", "attention_factor", "attn_factor", "original_max_position_embeddings"}
)


def yarn_entropy(factor: float, weight: float) -> float:
    """Return by how much attention scores grow for a context that is stretched by a factor. Source: arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
