"""`SumsById`: sums over samples that have the same id, in time and memory that grow with the samples alone."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_algos.terms.sample_sums import sample_sums


class SumsById:
    """Sums over those of N samples, or tokens, that have the same id. Deterministic on every device.

    Args:
        ids: int64 [N].
    """

    def __init__(self, ids: Tensor) -> None:
        _, self._of, self._counts = ids.unique(return_inverse=True, return_counts=True)
        self._order = self._of.argsort(stable=True)
        self._bounds = torch.cat([self._counts.new_zeros(1), self._counts.cumsum(0)])

    @property
    def size(self) -> Tensor:
        """How many have each one's id, itself included: int64 [N]."""
        sizes: Tensor = self._counts[self._of]
        return sizes

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over those of each one's id: [N]."""
        totals: Tensor = sample_sums(values[self._order], self._bounds)[self._of]
        return totals

    def ahead_of_first(self, values: Tensor) -> Tensor:
        """Return `values` [N] less that of the first of its id: [N]. Measured so, those of equal values are exactly 0."""
        ahead: Tensor = values - values[self._order[self._bounds[:-1]]][self._of]
        return ahead
