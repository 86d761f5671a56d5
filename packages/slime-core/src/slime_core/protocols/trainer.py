"""The protocol `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from slime_core.protocols.capabilities import TrainerCapabilities
from slime_core.protocols.transfer import Fingerprint, TransferPlan
from slime_core.runtime.phase_times import Phase

if TYPE_CHECKING:
    from slime_core.samples import TrainBatch

Metrics = dict[str, float]


@runtime_checkable
class Trainer(Protocol):
    """Trains on batches, and sends its weights under their Hugging Face names."""

    capabilities: TrainerCapabilities
    """What it can do; the same before `start` and after."""

    async def start(self) -> None:
        """Build the model from the Hugging Face folder, and the optimizer."""

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; return `train/*` metrics averaged over them, and `perf/*` of what they took.

        The batch's arrays may be read-only memory that other ranks read too: copy what is written to, or handed to code
        that may (torch writes to such memory without an error).
        """

    async def phases(self) -> Sequence[Phase]:
        """Return what the last `train` did and when, of every rank. Only for a trainer whose capabilities have `phases`."""

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send every tensor by the plan's transport; return the fingerprints of what was sent.

        Tensors are in the plan's dtype (float32 where the model family says so), and quantised if the plan has a
        `quantization`.
        """

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Write the whole state (weights, optimizer, RNG, ...), from which `load` resumes exactly.

        Args:
            path: an empty folder.
            in_background: return as soon as the state is copied, and write while training continues; see `written`. Only for
                a trainer whose capabilities have `background_save`.
        """

    async def written(self, wait: bool) -> bool:
        """Return whether the background save is complete; only this call may complete its folder.

        Args:
            wait: wait for it instead of returning False.

        Raises:
            CheckpointError: it could not be written, and is abandoned.
        """

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: the folder is of another model, or is incomplete.
        """

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Write a folder for other programs: with LoRA a PEFT adapter folder unless `merged`, else a whole Hugging Face folder."""

    async def offload(self) -> None:
        """Release device memory of everything but the weights; `send` still works."""

    async def onload(self) -> None:
        """Move all that was released back to the device."""

    async def close(self) -> None:
        """Free everything. May be called twice."""


class SendsByStage(Protocol):
    """What a trainer whose capabilities have `stage_senders` does besides."""

    async def stage_sender(self) -> int | None:
        """Return the number of this rank's pipeline stage, if it is the one that sends the stage's weights; None of the others."""


class OffloadsWeights(Protocol):
    """What a trainer whose capabilities have `offloads_weights` does besides. Both come between `offload` and `onload`."""

    async def offload_weights(self) -> None:
        """Release the device memory of the weights, too; nothing is sent until they are back."""

    async def onload_weights(self) -> None:
        """Move the weights alone back to the device, so that `send` works."""
