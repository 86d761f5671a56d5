"""`UpdateManifest`: the tensors of a weight update; `check_manifest` compares them with those of the receiver's model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from slime_core.errors import WeightSyncError
from slime_core.files.strict_read import Unreadable, checked, json_object, read_file
from slime_core.protocols import Fingerprint
from slime_core.weights.sync import Bucket

from slime_models.tensor_spec import Shape, Spec

_FILE = "manifest.json"
#: Names that an error shows.
_SHOWN = 5
_ALIGNMENT = 64
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of an update."""

    name: str
    """In the Hugging Face folder."""
    shape: Shape
    dtype: str
    """As torch spells it: `bfloat16`."""
    fingerprint: int
    """Fingerprint of the tensor as the engine is to hold it."""
    offset: int = 0
    """Byte offset in the file of changes or of staged tensors; 0 in a Hugging Face folder, which has names."""
    n_bytes: int = 0
    """Number of bytes at `offset`."""
    encoding: str = "whole"
    """`whole` where the bytes are the tensor, else the encoding of its changes (see `delta`)."""
    n_changed: int | None = None
    """Number of changed elements; None for a whole tensor."""

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        return Spec(shape=self.shape, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class UpdateManifest:
    """All tensors of an update, in the order in which they were sent."""

    version: str
    """Weight version that the plan names."""
    entries: Sequence[Entry]
    base: str | None = None
    """`digest` of the weights that changes are to be applied to; None where nothing is needed to read the update."""

    @property
    def digest(self) -> str:
        """Hash of all names and fingerprints: equal for equal weights, whatever their version and order."""
        text = json.dumps(sorted((entry.name, entry.fingerprint) for entry in self.entries))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _EntryText(_Strict):
    """An `Entry` as a file holds it."""

    name: str
    shape: list[_Count]
    dtype: str
    fingerprint: Annotated[int, Field(ge=0, lt=2**64)]
    offset: _Count
    n_bytes: _Count
    encoding: Literal["whole", "xor", "overwrite"]
    n_changed: _Count | None

    def entry(self) -> Entry:
        return entry_of(self.model_dump())


class _ManifestText(_Strict):
    """An `UpdateManifest` as a file holds it."""

    version: str
    entries: list[_EntryText]
    base: str | None


def read_manifest(folder: Path) -> UpdateManifest:
    """Read what `UpdateManifest.write` wrote.

    Raises:
        WeightSyncError: there is none, or it is damaged.
    """
    path = folder / _FILE
    try:
        text = checked(_ManifestText, json_object(read_file(path)))
    except (FileNotFoundError, Unreadable) as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else f"found {error}"
        raise WeightSyncError(
            f"{path}: not the manifest of a weight update ({found}); update again"
        ) from error
    return UpdateManifest(
        version=text.version, entries=[entry.entry() for entry in text.entries], base=text.base
    )


class TensorCheck:
    """Finds tensors of an update that the model does not have, that have another shape or dtype, come twice, or are missing.

    Args:
        specs: every tensor of the model, by Hugging Face name.
        version: of the update, for messages.
    """

    def __init__(self, specs: Mapping[str, Spec], *, version: str) -> None:
        self._specs, self._update = specs, f"update to version {version}"
        self._seen: set[str] = set()

    def see(self, name: str, shape: Shape, dtype: str) -> None:
        """Check one tensor.

        Raises:
            WeightSyncError: the model has no such tensor, it came before, or shape or dtype are others.
        """
        where, wanted = f"{self._update}: {name}", self._specs.get(name)
        if wanted is None:
            raise WeightSyncError(
                f"{where}: the engine's model has no such tensor; send its {len(self._specs)} tensors only"
            )
        if name in self._seen:
            raise WeightSyncError(f"{where}: sent twice; send each tensor once")
        if shape != wanted.shape:
            raise WeightSyncError(f"{where}: found shape {shape}; wanted {wanted.shape}")
        if dtype != wanted.dtype:
            raise WeightSyncError(
                f"{where}: found dtype {dtype}; wanted {wanted.dtype}; cast or quantise it as the plan says"
            )
        self._seen.add(name)

    def end(self) -> None:
        """Check that nothing is missing.

        Raises:
            WeightSyncError: names up to five tensors that were not seen.
        """
        missing = sorted(self._specs.keys() - self._seen)
        if missing:
            raise WeightSyncError(
                f"{self._update}: {len(missing)} of {len(self._specs)} tensors were not sent: {listed(missing)}"
            )


def check_manifest(manifest: UpdateManifest, specs: Mapping[str, Spec], *, version: str) -> None:
    """Check that an update is the one agreed on, and holds each tensor of the model once and as it should be.

    Raises:
        WeightSyncError: it is of another version; or names the tensors that are wrong.
    """
    if manifest.version != version:
        raise WeightSyncError(
            f"update to version {version}: what arrived is version {manifest.version}; wanted the version agreed on"
        )
    check = TensorCheck(specs, version=version)
    for entry in manifest.entries:
        check.see(entry.name, entry.shape, entry.dtype)
    check.end()


def entries_of(bucket: Bucket, fingerprints: Fingerprint) -> list[Entry]:
    """Return the entries of a bucket whose tensors have these fingerprints."""
    return [
        Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            fingerprint=fingerprints[name],
        )
        for name, tensor in bucket
    ]


def entry_of(values: Mapping[str, Any]) -> Entry:
    """Return an entry from its fields as JSON has them."""
    return Entry(**{**values, "shape": tuple(values["shape"])})


def bytes_of(bucket: Bucket) -> int:
    """Return how many bytes a bucket's tensors have."""
    return sum(tensor.nbytes for _, tensor in bucket)


def listed(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def aligned(n_bytes: int) -> int:
    """Return the next offset, at or after `n_bytes`, at which a tensor may begin in a file that holds several."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
