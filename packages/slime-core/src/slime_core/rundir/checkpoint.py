"""Checkpoints of a whole run: trainer, data position, buffer. One atomic, versioned folder a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError
from slime_core.files.checksums import MANIFEST, damages, flush, read_manifest, seal
from slime_core.files.strict_read import Unreadable, json_object, read_file
from slime_core.protocols import Trainer
from slime_core.runtime.deadline import within

STATE = "state.json"
TRAINER = "trainer"
_NAME = re.compile("step_[0-9]{1,18}")
#: What is put before the name of a checkpoint while it is written, and of one that is to be deleted.
_NEW, _OLD = ".tmp_", ".old_"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, found by its name; `verify` checks that it is complete and undamaged."""

    path: Path
    step: int
    """Last step that is in it."""
    is_named: bool = False
    """Whether it was asked for itself, and not as the newest of a run."""

    @property
    def trainer(self) -> Path:
        """Folder that the trainer wrote."""
        return self.path / TRAINER

    def verify(self) -> None:
        """Compare the checksum of every file with the manifest, before anything of it is used.

        Raises:
            CheckpointError: names files that are missing, changed or additional, and the newest intact checkpoint before it.
        """
        if found := self._damages():
            raise CheckpointError(
                f"{self.path}: found {'; '.join(found)}; wanted the files of its save, by the checksums in {MANIFEST}; "
                f"{self._way_on()}"
            )

    def state(self) -> dict[str, Any]:
        """Return the state of everything but the trainer.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        path = self.path / STATE
        try:
            return json_object(read_file(path), with_nan=True)
        except (FileNotFoundError, Unreadable) as error:
            found = error if isinstance(error, Unreadable) else "nothing"
            raise CheckpointError(f"{path}: found {found}; wanted the state that a save writes") from error

    def _damages(self) -> list[str]:
        try:
            manifest = read_manifest(self.path)
        except Unreadable as error:
            return [f"{error} (checkpoints of earlier versions have none, and cannot be checked)"]
        found = damages(self.path, manifest)
        if manifest.step != self.step:
            found.append(f"the checkpoint that {_named(self.path.parent, manifest.step).name} was")
        return found

    def _way_on(self) -> str:
        before = [one for one in checkpoints(self.path.parent) if one.step < self.step]
        intact = next((one.path for one in reversed(before) if not one._damages()), None)
        if intact is None:
            return "no checkpoint before it is intact: bring the files back from a copy, or start anew"
        if self.is_named:
            return f"the newest intact one before it is {intact}: give that one"
        aside = shlex.join(["mv", str(self.path), f"{self.path}.damaged"])
        return f"the newest intact one before it is {intact}: to go on from there, `{aside}`, then the same command"


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, oldest first: whatever has such a name, so that no damaged one is passed over.

    One that was put aside for another of its step is one as long as that has no name yet.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    found = [Checkpoint(folder / name, int(name[5:])) for name in names if _NAME.fullmatch(name)]
    found += [Checkpoint(folder / f"{_OLD}{name}", int(name[5:])) for name in _put_aside_of(names)]
    return sorted(found, key=lambda one: (one.step, one.path.name))


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, if there is one, whole or not."""
    return next(reversed(checkpoints(folder)), None)


def to_start_from(folder: Path | None, *, load: str | None) -> Checkpoint | None:
    """Return the newest checkpoint of a run, or else what `load` names: a checkpoint, or the newest of another's folder.

    Raises:
        CheckpointError: `load` is to be used, and holds none.
    """
    found = None if folder is None else latest(folder)
    if found is None and load is not None:
        found = at(Path(load)) or latest(Path(load) / "checkpoints") or latest(Path(load))
        if found is None:
            raise CheckpointError(
                f"checkpoint.load: {load} holds no checkpoint; wanted a run folder with checkpoints/, or one of these"
            )
    return found


def at(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a folder itself is; None where it is none."""
    if not any(os.path.lexists(path / name) for name in (MANIFEST, STATE)):
        return None
    path = Path(os.path.abspath(path))
    if _NAME.fullmatch(path.name):
        return Checkpoint(path, int(path.name[5:]), is_named=True)
    try:
        return Checkpoint(path, read_manifest(path).step, is_named=True)
    except Unreadable:
        return Checkpoint(path, 0, is_named=True)  # its check will tell


class Checkpoints:
    """Writes the checkpoints of a run, one at a time: each at once, or in the background while the run goes on.

    A checkpoint is written under another name and renamed when complete, so that a crash or a full disk leaves the
    earlier ones as they were.

    Args:
        folder: of all checkpoints.
        trainer: of the run; one whose capabilities have `background_save` where that is asked for.
        keep: newest checkpoints that are kept.
        in_background: whether the run continues while a checkpoint is written.
        save_hf: path of the Hugging Face folder that is written before each checkpoint, with `{step}` or `{rollout_id}`.
        timeout_s: longest that writing one may take, seconds.
        held: opens a block in which the run is not cancelled; completing a checkpoint is one.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        *,
        keep: int,
        in_background: bool,
        save_hf: str | None = None,
        timeout_s: float = 7200.0,
        held: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._folder, self._trainer, self._keep = folder, trainer, keep
        self._in_background, self._save_hf, self._timeout_s = in_background, save_hf, timeout_s
        self._held = held
        self._begun: int | None = None
        self._sealing: asyncio.Future[None] | None = None

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the folder of `save_hf`, then a checkpoint, or begin to when the one before is complete.

        Args:
            step: last step that is in it.
            state: JSON values, of everything but the trainer; it may change after the call.

        Raises:
            CheckpointError: this or the one before could not be written; nothing of it is left behind.
            DeadlineError: it was not written in time.
        """
        await self._in_time(step, self._save(step, state))

    async def _save(self, step: int, state: Mapping[str, Any]) -> None:
        if self._save_hf is not None:
            await self._trainer.save_hf(Path(self._save_hf.format(step=step, rollout_id=step - 1)))
        await self._complete(wait=True)
        clean(self._folder)
        with self._whole_or_nothing(step) as temporary:
            (temporary / TRAINER).mkdir(parents=True)
            with (temporary / STATE).open("w", encoding="utf-8") as file:
                file.write(json.dumps(dict(state) | {"step": step}))  # `json.dump` takes twice as long
            if self._in_background:
                await self._trainer.save(temporary / TRAINER, in_background=True)
            else:
                await self._trainer.save(temporary / TRAINER)
                await asyncio.to_thread(seal, temporary, step)
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
            DeadlineError: it was not written in time.
        """
        if self._begun is not None:
            with self._held():
                await self._in_time(self._begun, self._complete(wait=wait))

    async def _in_time(self, step: int, work: Awaitable[None]) -> None:
        await within(self._timeout_s, f"the checkpoint after step {step} (--train-timeout-s)", work)

    async def _complete(self, *, wait: bool) -> None:
        if self._begun is None:
            return
        step, self._begun = self._begun, None
        with self._whole_or_nothing(step) as temporary:
            is_complete = await self._sealed(temporary, step, wait=wait)
        if is_complete:
            self._finish(step)
        else:
            self._begun = step

    async def _sealed(self, temporary: Path, step: int, *, wait: bool) -> bool:
        """Return whether the folder of the save in the background is written and sealed; seal it once it is written."""
        if self._sealing is None:
            if not await self._trainer.written(wait=wait):
                return False
            self._sealing = asyncio.ensure_future(asyncio.to_thread(seal, temporary, step))
        if not wait and not self._sealing.done():
            return False
        sealing, self._sealing = self._sealing, None
        await sealing
        return True

    def _finish(self, step: int) -> None:
        """Rename a sealed checkpoint to its final name, then delete the one that had it, and old ones."""
        final = _named(self._folder, step)
        with self._whole_or_nothing(step) as temporary:
            earlier = _put_aside(final) if final.exists() else None
            temporary.rename(final)
            flush(self._folder)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
        for old in checkpoints(self._folder)[: -self._keep]:
            with contextlib.suppress(OSError):
                _remove(old.path)

    @contextlib.contextmanager
    def _whole_or_nothing(self, step: int) -> Iterator[Path]:
        """Yield the folder that a checkpoint is written under; it goes when the block raises."""
        final = _named(self._folder, step)
        temporary = self._folder / f"{_NEW}{final.name}"
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
    """Delete the remains of an interrupted save or deletion, once `bring_back` has brought back what is none."""
    bring_back(folder)
    for prefix in (_NEW, _OLD):
        for leftover in folder.glob(f"{prefix}step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def bring_back(folder: Path) -> None:
    """Give a checkpoint its name again that was put aside for another of its step, where that has no name yet."""
    for one in checkpoints(folder):
        if one.path.name.startswith(_OLD):
            one.path.rename(folder / one.path.name.removeprefix(_OLD))


def _put_aside_of(names: Collection[str]) -> list[str]:
    """Return the names that checkpoints had which were put aside for others of their step, as a kill between two renames leaves them.

    A deletion that was interrupted leaves one that is aside, too, and nothing that is written in its place.
    """
    written = [name.removeprefix(_NEW) for name in names if name.startswith(_NEW)]
    return [
        name for name in written if _NAME.fullmatch(name) and f"{_OLD}{name}" in names and name not in names
    ]


def _named(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a folder with a checkpoint's name is always complete."""
    shutil.rmtree(_put_aside(checkpoint), ignore_errors=True)


def _put_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be deleted; returns its new name."""
    old = checkpoint.with_name(f"{_OLD}{checkpoint.name}")
    shutil.rmtree(old, ignore_errors=True)
    return checkpoint.rename(old)
