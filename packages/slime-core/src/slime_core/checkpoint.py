"""Checkpoints of a whole run: trainer, data position, buffer. One atomic, versioned folder a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError

STATE = "state.json"
TRAINER = "trainer"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    next_step: int
    """First step that is not in it."""

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
    return max(complete, key=lambda checkpoint: checkpoint.next_step, default=None)


async def save(
    folder: Path,
    *,
    next_step: int,
    state: Mapping[str, Any],
    save_trainer: Callable[[Path], Awaitable[None]],
    keep: int,
) -> Checkpoint:
    """Write a checkpoint, then delete all but the newest `keep`.

    It is written under another name and renamed when complete, so that a crash or a full disk leaves the
    earlier ones as they were.

    Raises:
        CheckpointError: it could not be written; nothing of it is left behind.
    """
    clean(folder)
    final, temporary = folder / f"step_{next_step:06d}", folder / f".tmp_step_{next_step:06d}"
    try:
        temporary.mkdir(parents=True)
        (temporary / TRAINER).mkdir()
        await save_trainer(temporary / TRAINER)
        with (temporary / STATE).open("w", encoding="utf-8") as file:
            json.dump(dict(state) | {"next_step": next_step}, file)
        _flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        before = latest(folder)
        survives = f"the checkpoint {before.path} is intact" if before else "there is no earlier checkpoint"
        raise CheckpointError(
            f"{final}: cannot be written: {error}; {survives}; make room and run the same command again"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in sorted(folder.glob("step_*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(final, next_step)


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for leftover in folder.glob(".tmp_step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Bring every file of a folder to the disk, so that the rename cannot overtake them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
