"""Rows of the table: a quantity, by us and by a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_bench.conformance.case import Case

LIMIT = 1e-6
"""Largest relative difference of two values that are the same."""


@dataclass(frozen=True)
class Row:
    """One quantity that a peer exposes."""

    peer: str
    """Framework: `verl`."""
    name: str
    """What is compared, in our words."""
    ours: Callable[[Case], Tensor]
    theirs: Callable[[Case], Tensor]
    """Calls the peer's own function."""
    differs: str | None = None
    """The documented convention by which the two differ; None where they must agree."""


@dataclass(frozen=True)
class Difference:
    """Two answers to one row."""

    ours: Tensor
    theirs: Tensor

    @property
    def relative(self) -> float:
        """Largest difference, as a share of the largest value."""
        scale = max(float(self.theirs.abs().max()), float(self.ours.abs().max()), 1e-30)
        return float((self.ours.double() - self.theirs.double()).abs().max()) / scale

    @property
    def shown(self) -> tuple[float, float]:
        """Our and their entry where they differ most; the largest where they do not differ at all."""
        gap = (self.ours - self.theirs).abs()
        at = int(gap.argmax() if gap.any() else self.theirs.abs().argmax())
        return float(self.ours[at]), float(self.theirs[at])


def compare(row: Row, seed: int, dtype: torch.dtype) -> Difference:
    """Work a row out on the case of a seed, in `dtype`.

    In float32 theirs is the nearer of their answers in float32, whose inputs are rounded as ours are, and in
    float64, which counts where their rounding is larger than ours: exp(x) − 1 − x loses digits that expm1 keeps.
    """
    ours = row.ours(Case.random(seed, dtype)).detach()
    answers = [row.theirs(Case.random(seed, d)).detach() for d in dict.fromkeys((dtype, torch.float64))]
    return min((Difference(ours, theirs) for theirs in answers), key=lambda difference: difference.relative)
