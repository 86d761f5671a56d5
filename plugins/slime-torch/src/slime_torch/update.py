"""One weight update, taken in bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_core.errors import WeightSyncError
from torch import Tensor

from slime_torch.weights import Weights


class Update:
    """Checks each bucket whole before it copies any of it.

    Args:
        weights: written to, in place.
        dtype: that the tensors must have.
        version: for messages.
    """

    def __init__(self, weights: Weights, *, dtype: torch.dtype, version: str) -> None:
        self._weights, self._dtype, self.version = weights, dtype, version
        self._seen: set[str] = set()

    @property
    def n_written(self) -> int:
        """Tensors copied so far."""
        return len(self._seen)

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy a bucket in.

        Raises:
            WeightSyncError: a tensor is unknown, sent twice, or of another shape or dtype; nothing was copied.
        """
        tensors = dict(bucket)
        names = [name for name, _ in bucket]
        for name, tensor in bucket:
            if name in self._seen or names.count(name) > 1:
                raise WeightSyncError(
                    f"update to version {self.version}: {name}: sent twice; send each tensor once"
                )
            self._weights.check(name, tensor, dtype=self._dtype, version=self.version)
        self._weights.write(tensors)
        self._seen.update(tensors)

    def finish(self) -> dict[str, int]:
        """Check that nothing is missing, and return the fingerprint of what the engine stores now.

        Raises:
            WeightSyncError: names up to five tensors that were not sent.
        """
        missing = sorted(self._weights.shapes().keys() - self._seen)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"update to version {self.version}: {len(missing)} of {len(self._weights)} tensors were not sent: "
                f"{shown}"
            )
        return self._weights.fingerprint()
