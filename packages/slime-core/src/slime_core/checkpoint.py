"""Checkpoints of a whole run: trainer, data position, buffer. One atomic, versioned folder a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from slime_core.errors import CheckpointError
from slime_core.protocols import Trainer

STATE = "state.json"
TRAINER = "trainer"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Last step that is in it."""

    @property
    def trainer(self) -> Path:
        """Folder that the trainer wrote."""
        return self.path / TRAINER

    def state(self) -> dict[str, Any]:
        """Return the state of everything but the trainer.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        try:
            state: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path / STATE}: found {error}; wanted the state that a save writes"
            ) from error
        return state


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a folder, if there is one."""
    complete = [
        Checkpoint(path, int(path.name.removeprefix("step_")))
        for path in folder.glob("step_*")
        if path.name.removeprefix("step_").isdigit() and (path / STATE).exists()
    ]
    return max(complete, key=lambda checkpoint: checkpoint.step, default=None)


def to_start_from(folder: Path | None, *, load: str | None) -> Checkpoint | None:
    """Return the newest checkpoint of a run, or else the newest of another's folder, if that is given.

    Raises:
        CheckpointError: `load` is to be used, and holds none.
    """
    found = None if folder is None else latest(folder)
    if found is None and load is not None:
        found = latest(Path(load) / "checkpoints") or latest(Path(load))
        if found is None:
            raise CheckpointError(
                f"checkpoint.load: {load} holds no checkpoint; wanted a run folder with checkpoints/"
            )
    return found


class SavesInBackground(Protocol):
    """A `Trainer` that can write while it trains on. Its factory says so: `saves_in_background = True` as attribute."""

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Write all state. In the background, return as soon as a copy of it is taken; `written` completes the folder."""

    async def written(self, wait: bool) -> bool:
        """Return whether the folder of the save in the background is complete, which it may be from now on only.

        Args:
            wait: for it, instead of returning False.

        Raises:
            CheckpointError: it could not be written. It is no longer waited for then.
        """


class Checkpoints:
    """Writes the checkpoints of a run, one at a time: each at once, or in the background while the run goes on.

    A checkpoint is written under another name and renamed when complete, so that a crash or a full disk leaves the
    earlier ones as they were.

    Args:
        folder: of all checkpoints.
        trainer: of the run; one that `SavesInBackground` where that is asked for.
        keep: newest checkpoints that are kept.
        in_background: whether the run goes on while a checkpoint is written.
    """

    def __init__(self, folder: Path, trainer: Trainer, *, keep: int, in_background: bool) -> None:
        self._folder, self._trainer, self._keep = folder, trainer, keep
        self._in_background = in_background
        self._begun: int | None = None

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, or begin to when the one before is complete.

        Args:
            step: last step that is in it.
            state: JSON values, of everything but the trainer; it may change after the call.

        Raises:
            CheckpointError: this or the one before could not be written; nothing of it is left behind.
        """
        await self.complete(wait=True)
        save_trainer: Callable[[Path], Awaitable[None]] = self._trainer.save
        if self._in_background:
            save_trainer = partial(cast(SavesInBackground, self._trainer).save, in_background=True)
        clean(self._folder)
        with self._whole_or_nothing(step) as temporary:
            (temporary / TRAINER).mkdir(parents=True)
            with (temporary / STATE).open("w", encoding="utf-8") as file:
                json.dump(dict(state) | {"step": step}, file)
            await save_trainer(temporary / TRAINER)
        if self._in_background:
            self._begun = step
        else:
            self._finish(step)

    async def complete(self, *, wait: bool) -> None:
        """Complete the checkpoint that is being written in the background, if there is one and it is written.

        Args:
            wait: until it is written.

        Raises:
            CheckpointError: it could not be written; nothing of it is left behind.
        """
        if self._begun is None:
            return
        step, self._begun = self._begun, None
        with self._whole_or_nothing(step):
            written = await cast(SavesInBackground, self._trainer).written(wait)
        if written:
            self._finish(step)
        else:
            self._begun = step

    def _finish(self, step: int) -> None:
        """Give a checkpoint that is written its name, then delete all but the newest."""
        final = _named(self._folder, step)
        with self._whole_or_nothing(step) as temporary:
            _flush(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
        for old in sorted(self._folder.glob("step_*"))[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _whole_or_nothing(self, step: int) -> Iterator[Path]:
        """Yield the folder that a checkpoint is written under; it goes when the block raises."""
        final = _named(self._folder, step)
        temporary = self._folder / f".tmp_{final.name}"
        try:
            yield temporary
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            before = latest(self._folder)
            survives = (
                f"the checkpoint {before.path} is intact" if before else "there is no earlier checkpoint"
            )
            raise CheckpointError(
                f"{final}: cannot be written: {error}; {survives}; make room and run the same command again"
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for leftover in folder.glob(".tmp_step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _named(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _flush(folder: Path) -> None:
    """Bring every file of a folder to the disk, so that the rename cannot overtake them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
