"""`UpdateStorage`: what an engine gives the receiving half of a transport: where an update is staged, and what it must hold."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_core.runtime.daemon_thread import DaemonThread

from slime_models.tensor_spec import Spec
from slime_models.transfer.changes import Encoding
from slime_models.transfer.shared_memory import LockedFolder
from slime_models.transfer.staging import StagedUpdate, StagingFolder

#: Seconds between two looks for the other side: the first, and the most.
_POLL_S = 0.001, 0.02
#: Folders of earlier updates that are remembered for removal.
_REMEMBERED = 8


@dataclass(kw_only=True)
class UpdateStorage:
    """Where updates are staged, and which tensors they must have."""

    specs: Mapping[str, Spec]
    """Every tensor of the model, by Hugging Face name."""
    model_path: Path
    """Hugging Face folder that the engine serves."""
    staging_dir: Path
    """Parent of the staging folder, in shared memory."""
    disk_dir: Path
    """Where the sender writes, for transports by disk."""
    keep_files: bool
    """Keep folders of earlier updates."""
    owns_disk_dir: bool = False
    """Whether nobody else writes to `disk_dir`, so that what is there at first was left by a process that was killed."""
    encoding: Encoding
    """Of the changes of `disk-delta`."""
    timeout_s: float
    """Deadline of a broadcast, seconds."""
    host: str = "127.0.0.1"
    """IPv4 address of this machine at which the transports `distributed`, `nccl` and `cuda-ipc` meet."""
    has_ranks: bool = False
    """Whether the engine has servers, whose ranks may join the next update."""
    # One thread for all of it: torch keeps a pool of workers for each thread that calls it.
    _thread: DaemonThread = field(default_factory=lambda: DaemonThread("weight-updates"))
    _folders: deque[Path] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @cached_property
    def staging(self) -> StagingFolder:
        """The folder in shared memory, made on first use."""
        return StagingFolder(self._locked_folder.path, specs=self.specs)

    @cached_property
    def _locked_folder(self) -> LockedFolder:
        return LockedFolder(self.staging_dir, prefix="slime-weights-")

    @property
    def has_staging(self) -> bool:
        """Whether it was made."""
        return "staging" in vars(self)

    def is_staged(self, update: StagedUpdate) -> bool:
        """Whether an update is in the folder in shared memory, which the next one overwrites."""
        return self.has_staging and update.folder == self.staging.folder

    def new_folder(self, version: str) -> Path:
        """Return a new folder name for an update; each call returns another one."""
        if self.owns_disk_dir and not self.keep_files and not self._folders:
            shutil.rmtree(self.disk_dir, ignore_errors=True)
        name = re.sub(r"[^\w.-]", "_", version)
        folder = self.disk_dir.absolute() / f"weight_v{name:0>6}-{secrets.token_hex(4)}"
        self._folders.append(folder)
        return folder

    def drop_folders(self, but: Path | None = None) -> None:
        """Remove the folders of updates except one, unless they are to be kept."""
        if not self.keep_files:
            for folder in self._folders:
                if folder != but:
                    shutil.rmtree(folder, ignore_errors=True)

    async def on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on the thread of updates, after those of earlier updates, and await it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def forget(self) -> None:
        """Count what is in shared memory as no update any more."""
        if self.has_staging:
            self.staging.forget()

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)  # a sender that hangs may keep it
        self.drop_folders()
        if self.has_staging:
            del self.staging
        if "_locked_folder" in vars(self):
            self._locked_folder.remove()
            del self._locked_folder


async def appears(folder: Path) -> None:
    """Wait until a folder is there."""
    waits = pauses()
    while not folder.exists():
        await asyncio.sleep(next(waits))


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between one look for the other side and the next: a quarter of those waited so far, within bounds."""
    least, most = _POLL_S
    waited = 0.0
    while True:
        pause = min(max(least, waited / 4), most)
        yield pause
        waited += pause
