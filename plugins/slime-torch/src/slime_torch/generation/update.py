"""`WeightUpdate`: checks and copies the buckets of one weight update, as they come or from a staged one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from slime_core.errors import WeightSyncError
from slime_core.weights.sync import Bucket
from slime_models.transfer.manifest import listed
from slime_models.transfer.staging import StagedTensors, StagedUpdate
from torch import Tensor

from slime_torch.storage.weights import Weights

#: Bytes of staged tensors that are copied at once.
_BUCKET_BYTES = 1 << 28


class WeightUpdate:
    """Checks each bucket whole before it copies any of it.

    Args:
        weights: written to, in place.
        version: for messages.
    """

    def __init__(self, weights: Weights, *, version: str) -> None:
        self._weights, self.version = weights, version
        self._seen: set[str] = set()

    @property
    def mixture(self) -> str | None:
        """What the weights are where it goes no further; None where nothing of it has been written."""
        if not self._seen:
            return None
        return (
            f"the weights are a mixture: the update to version {self.version} ended after {len(self._seen)} of "
            f"{len(self._weights)} tensors were begun; update again"
        )

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy a bucket in.

        Raises:
            WeightSyncError: a tensor is unknown, sent twice, or of another shape or dtype; nothing was copied.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in bucket:
            if name in self._seen or name in tensors:
                raise WeightSyncError(
                    f"update to version {self.version}: {name}: sent twice; send each tensor once"
                )
            self._weights.check(name, tensor, version=self.version)
            tensors[name] = tensor
        self._seen.update(tensors)  # before they are written: what raises may have written some
        self._weights.write(tensors)

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


async def staged_buckets(update: StagedUpdate, *, bucket_bytes: int = _BUCKET_BYTES) -> AsyncIterator[Bucket]:
    """Yield the tensors of a staged update in buckets, once all of them are known to be those that were sent.

    Args:
        update: complete.
        bucket_bytes: of the tensors of a bucket at most, unless one tensor has more.

    Raises:
        WeightSyncError: names up to five tensors that are not.
    """
    staged = StagedTensors(update.folder)
    if damaged := await asyncio.to_thread(staged.damaged):
        raise WeightSyncError(
            f"update to version {update.version}: {listed(damaged)}: the bytes that arrived are not those that were sent"
        )
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in staged.tensors():
        if bucket and held + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
