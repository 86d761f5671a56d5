"""`Stager`: takes the tensors of an update and stages them once, however many servers are to load them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from slime_core.openmp import release_threads
from slime_core.protocols import TransferPlan
from slime_core.weights import Bucket

from slime_sglang.staging import Shape, Staging


class Stager:
    """Owns the shared memory of updates.

    Args:
        folder: where it makes a folder of its own.
        shapes: Hugging Face name -> shape of every tensor of the model.
        dtype: of all of them, as torch spells it.
    """

    def __init__(self, folder: Path, *, shapes: Mapping[str, Shape], dtype: str) -> None:
        self._folder = folder / f"slime-weights-{secrets.token_hex(8)}"
        self._shapes, self._dtype = shapes, dtype
        self._staging: Staging | None = None
        # One thread for all of it: torch keeps a pool of workers for each thread that calls it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang-staging")

    async def stage(self, plan: TransferPlan) -> Staging:
        """Copy the tensors of an update in, and write its manifest; forgets the update before.

        Raises:
            WeightSyncError: a tensor is unknown, missing or misshapen; names it.
        """
        if self._staging is None:
            self._staging = Staging(self._folder, shapes=self._shapes, dtype=getattr(torch, self._dtype))
        staging = self._staging
        staging.begin()
        loop = asyncio.get_running_loop()
        async for bucket in plan.channel.buckets():
            await loop.run_in_executor(self._thread, _put, staging, bucket, plan.version)
        await loop.run_in_executor(self._thread, release_threads)
        staging.seal(version=plan.version)
        return staging

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._thread.shutdown()
        if self._staging is not None:
            self._staging.remove()
            self._staging = None


def _put(staging: Staging, bucket: Bucket, version: str) -> None:
    for name, tensor in bucket:
        staging.put(name, tensor, version=version)
