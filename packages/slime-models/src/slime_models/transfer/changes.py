"""Changes of a tensor: encoding them, and applying them.

A change of a tensor is which elements changed, and how. The positions are kept as gaps between them, the values as new
ones or as exclusive or with the old ones. Both are stored by byte planes (all lowest bytes, then all second ones), which
compress well, as one zstd frame with its checksum. Where an optimizer step of a small learning rate moves a bfloat16 at
all, it mostly moves it to its neighbour, so that most of the planes of `xor` hold a few values only: it takes about half
the bytes of `overwrite`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.errors import PluginError, WeightSyncError
from torch import Tensor

Encoding = Literal["xor", "overwrite"]

#: File of changes in the folder of an update.
CHANGES = "changes.bin"
_LEVEL = 1
#: The bytes of one element as one word.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Types of gaps, narrowest first.
_GAPS = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64"))


def encode_changes(old: Tensor, new: Tensor, encoding: Encoding) -> tuple[bytes, int]:
    """Return (encoded changes from `old` to `new`, number of changed elements); empty bytes where nothing changed.

    Both are tensors on the CPU, of the same shape and dtype.
    """
    before, after = _words(old), _words(new)
    difference = before ^ after
    places = np.flatnonzero(difference)
    if not len(places):
        return b"", 0
    gaps = np.diff(places, prepend=0)
    width = next(i for i, kind in enumerate(_GAPS) if gaps.max() < 256**kind.itemsize)
    values = difference[places] if encoding == "xor" else after[places]
    body = bytes([width]) + _planes(gaps.astype(_GAPS[width])) + _planes(values)
    return _zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True).compress(body), len(places)


def apply_changes(
    tensor: Tensor, changes: bytes | memoryview, *, n_changed: int, encoding: Encoding, name: str
) -> None:
    """Apply encoded changes in place to a contiguous tensor on the CPU.

    Raises:
        WeightSyncError: the bytes are damaged; names the tensor. Nothing was written.
    """
    if n_changed == 0 and not changes:
        return
    zstandard, words = _zstandard(), _words(tensor)
    try:
        body = memoryview(zstandard.ZstdDecompressor().decompress(changes))
        gap_type = _GAPS[body[0]]
        gap_bytes = n_changed * gap_type.itemsize
        gaps = _from_planes(body[1 : 1 + gap_bytes], gap_type, n_changed)
        values = _from_planes(body[1 + gap_bytes :], words.dtype, n_changed)
        places = np.cumsum(gaps, dtype=np.int64)
        if places[-1] >= len(words):
            raise ValueError(f"a change at element {places[-1]} of {len(words)}")
    except (zstandard.ZstdError, ValueError, IndexError) as error:
        raise WeightSyncError(
            f"{name}: the changes that arrived are damaged ({error}); update again"
        ) from error
    words[places] = words[places] ^ values if encoding == "xor" else values


def _words(tensor: Tensor) -> NDArray[Any]:
    words: NDArray[Any] = tensor.detach().reshape(-1).view(_WORDS[tensor.dtype.itemsize]).numpy()
    return words


def _planes(values: NDArray[Any]) -> bytes:
    return values.view(np.uint8).reshape(len(values), -1).T.tobytes()


def _from_planes(data: memoryview, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(kind.itemsize, count)
    return np.ascontiguousarray(planes.T).view(kind).reshape(count)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise PluginError(
            "transport disk-delta needs zstandard, which is not installed; install slime-models[delta]"
        ) from error
    return zstandard
