"""Sealing a folder: a manifest with the checksums of all its files, by which damage is found before use."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_core.files.strict_read import Counted, Unreadable, checked, json_object, read_file

#: The file; written last.
MANIFEST = "manifest.json"
#: Bytes of a file that are hashed in one go.
PIECE = 1 << 26
_BLOCK = 1 << 20
#: Files of each kind of damage that are named.
_SHOWN = 4


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileSum(_Strict):
    """What a file held when the folder was sealed."""

    n_bytes: Annotated[int, Field(ge=0)]
    sha256_of_pieces: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the SHA-256 of each piece of `PIECE` bytes, so that several cores read one large file."""


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
    """Bring all files of a folder to the disk, and then their checksums; all cores read.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    paths = dict(_files(folder))
    with ThreadPoolExecutor(os.cpu_count(), "checksums") as pool:
        begun = {name: _begin(path, pool) for name, path in paths.items()}
        sums = {name: summed() for name, summed in begun.items()}
    for path in paths.values():
        flush(path)
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
    with ThreadPoolExecutor(os.cpu_count(), "checksums") as pool:
        begun = {name: _compare(found[name], manifest.files[name], pool) for name in present}
        changed = [name for name, is_same in begun.items() if not is_same()]
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


def _begin(path: Path, pool: Executor) -> Callable[[], FileSum]:
    """Begin to read a file, and return what returns its sum once it is read."""
    size = path.stat().st_size
    pieces = [pool.submit(_piece, path, start) for start in range(0, size, PIECE)]

    def summed() -> FileSum:
        whole = hashlib.sha256(b"".join(piece.result() for piece in pieces))
        return FileSum(n_bytes=size, sha256_of_pieces=whole.hexdigest())

    return summed


def _piece(path: Path, start: int) -> bytes:
    """Return the SHA-256 of a piece of a file."""
    digest, end = hashlib.sha256(), start + PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(min(_BLOCK, end - file.tell())):
            digest.update(block)
    return digest.digest()


def _compare(path: Path, wanted: FileSum, pool: Executor) -> Callable[[], bool]:
    """Begin to read a file, and return what says whether it is as it was; of another size it is not read."""
    try:
        status = path.stat()  # looked at first: opening a pipe would wait for a writer
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.n_bytes:
            return lambda: False
        summed = _begin(path, pool)
    except OSError:
        return lambda: False

    def is_same() -> bool:
        try:
            return summed() == wanted
        except OSError:
            return False

    return is_same


def _some(names: list[Any]) -> str:
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
