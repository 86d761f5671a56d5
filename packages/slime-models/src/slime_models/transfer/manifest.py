"""`Manifest`: what an update consists of, and `check_manifest`: whether that is what the receiver's model needs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint
from slime_core.weights import Bucket

_FILE = "manifest.json"
#: Names that an error shows.
_SHOWN = 5
_ALIGNMENT = 64

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a tensor of an engine's model must be."""

    shape: Shape
    dtype: str
    """As torch spells it: `bfloat16`."""

    @property
    def n_bytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of an update."""

    name: str
    """In the Hugging Face folder."""
    shape: Shape
    dtype: str
    """As torch spells it: `bfloat16`."""
    fingerprint: int
    """Of the whole tensor as it is to be held."""
    offset: int = 0
    """Where its bytes begin in a file that has no names of its own."""
    n_bytes: int = 0
    """How many they are there."""
    encoding: str = "whole"
    """What these bytes are: the tensor, or changes (see `delta`)."""
    n_changed: int | None = None
    """Elements that changes alter; None where the tensor is there whole."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All tensors of an update, in the order in which they were sent."""

    version: str
    """That the sender was told to send."""
    entries: Sequence[Entry]
    base: str | None = None
    """`digest` of the weights that changes are to be applied to; None where nothing is needed to read the update."""

    @property
    def digest(self) -> str:
        """Identifies the weights, whatever their version is called."""
        text = json.dumps(sorted((entry.name, entry.fingerprint) for entry in self.entries))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """Read what `Manifest.write` wrote.

    Raises:
        WeightSyncError: there is none, or it is damaged.
    """
    path = folder / _FILE
    try:
        values = json.loads(path.read_text())
        entries = [Entry(**entry | {"shape": tuple(entry["shape"])}) for entry in values.pop("entries")]
        return Manifest(entries=entries, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightSyncError(
            f"{path}: not the manifest of a weight update ({error}); update again"
        ) from error


class TensorCheck:
    """Finds tensors that a model does not have, has otherwise, or that come twice or not at all.

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


def check_manifest(manifest: Manifest, specs: Mapping[str, Spec], *, version: str) -> None:
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


def bytes_of(bucket: Bucket) -> int:
    """Return how many bytes a bucket's tensors have."""
    return sum(tensor.nbytes for _, tensor in bucket)


def listed(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def aligned(n_bytes: int) -> int:
    """Return where the next tensor may begin in a file that holds several."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
