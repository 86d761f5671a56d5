"""The seal of a folder: a file with the checksums of all others, by which damage is found before anything is used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_core.parsing import Counted, Unreadable, checked, json_object, read_file

#: The file; written last.
MANIFEST = "manifest.json"
#: Files of each kind of damage that are named.
_SHOWN = 4


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileSum(_Strict):
    """What a file held when the folder was sealed."""

    n_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(_Strict):
    """What a sealed folder says of itself."""

    format: Literal[1]
    step: Counted
    """Last step that is in the checkpoint, which its name says too."""
    files: dict[str, FileSum]
    """By their paths below the folder, the manifest left out."""

    def text(self) -> str:
        """Return what the file holds; any other spelling of the same is damage."""
        return json.dumps(self.model_dump(), indent=1, sort_keys=True) + "\n"


def seal(folder: Path, step: int) -> None:
    """Bring all files of a folder to the disk, and then their checksums; several files are read at once.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    paths = dict(_files(folder))
    with ThreadPoolExecutor(_threads(len(paths)), "checksums") as pool:
        sums = dict(zip(paths, pool.map(_flushed_sum, paths.values()), strict=True))
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(Manifest(format=1, step=step, files=sums).text())
        file.flush()
        os.fsync(file.fileno())
    for place, *_ in os.walk(folder):
        flush(Path(place))


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Return what a folder was sealed with.

    Raises:
        Unreadable: it has no manifest, or none that a seal wrote.
    """
    try:
        data = read_file(folder / MANIFEST)
    except FileNotFoundError:
        raise Unreadable(f"no {MANIFEST}") from None
    try:
        manifest = checked(Manifest, json_object(data))
    except Unreadable as error:
        raise Unreadable(f"{MANIFEST} with {error}") from None
    if manifest.text().encode() != data:
        raise Unreadable(f"{MANIFEST} spelt otherwise than it was written")
    return manifest


def damages(folder: Path, manifest: Manifest) -> list[str]:
    """Return how the files of a folder are not those that were sealed, empty if they are; reads all of them."""
    found = dict(_files(folder))
    missing = sorted(manifest.files.keys() - found.keys())
    additional = sorted(found.keys() - manifest.files.keys())
    present = sorted(manifest.files.keys() & found.keys())
    with ThreadPoolExecutor(_threads(len(present)), "checksums") as pool:
        same = pool.map(lambda name: _is_same(found[name], manifest.files[name]), present)
        changed = [name for name, is_same in zip(present, same, strict=True) if not is_same]
    kinds = {"missing": missing, "additional": additional, "changed": changed}
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of whatever is in a folder and is no folder, but for the manifest."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*files, *links):
            path = Path(place) / name
            if path != folder / MANIFEST:
                yield path.relative_to(folder).as_posix(), path


def _threads(n_files: int) -> int:
    return max(1, min(n_files, os.cpu_count() or 1))


def _flushed_sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileSum(n_bytes=file.tell(), sha256=found)


def _is_same(path: Path, wanted: FileSum) -> bool:
    try:
        status = path.stat()  # looked at first: opening a pipe would wait for a writer
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.n_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
    except OSError:
        return False


def _some(names: list[Any]) -> str:
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
