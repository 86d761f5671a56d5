"""`Compact`: a column of numbers in one block of memory, which behaves as a list of them."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeGuard, overload

import numpy as np

from slime_core.samples.reused_memory import ReusedMemory

if TYPE_CHECKING:
    _Array = array.array[Any]
else:
    _Array = array.array

#: The type code of ids: 32-bit integers, as in batches.
IDS = "i"
#: The type code of ids as Python has them.
INT64 = "q"
#: The type code of masks: 8-bit integers.
MASK = "b"
#: Type codes of log-probs: 32-bit floats for those that an engine computed as such, 64-bit for others.
FLOAT32, FLOAT64 = "f", "d"
_DTYPES = {IDS: np.int32, INT64: np.int64, MASK: np.int8, FLOAT32: np.float32, FLOAT64: np.float64}


#: Columns that are joined at a time: few enough for a processor's cache.
_JOINED = 128

# Called by name: looking them up by `super` takes longer than they do.
_new, _get, _extend = _Array.__new__, _Array.__getitem__, _Array.extend


class Compact(_Array):
    """An `array.array` of 4 bytes a number, where a list of Python's has 32, that adds and compares as a list does.

    Indexing and iterating give Python's numbers; slices, copies and sums are compact, too; numpy reads it without a copy.
    What is no number of its type is refused by TypeError or OverflowError.

    Args:
        typecode: `IDS`, `INT64`, `MASK`, `FLOAT32` or `FLOAT64`.
        values: numbers, a numpy array of any numeric dtype, or the bytes of the column.
    """

    __slots__ = ()

    def __new__(cls, typecode: str, values: Iterable[Any] | bytes = ()) -> Self:
        """Build a column."""
        if isinstance(values, np.ndarray):
            values = _cast(values, _DTYPES[typecode]).tobytes()
        return _new(cls, typecode, values)

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Any: ...
    @overload
    def __getitem__(self, key: slice, /) -> Compact: ...
    def __getitem__(self, key: Any, /) -> Any:
        """Return a number, or a part of the column."""
        found = _get(self, key)
        return _new(Compact, self.typecode, found) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> Compact:
        """Return the column with further numbers behind it."""
        return self._joined(self, other)

    def __radd__(self, other: Any) -> Compact:
        """Return the column with further numbers before it."""
        return self._joined(other, self)

    def __iadd__(self, other: Any) -> Self:
        """Append numbers."""
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        """Compare as a list, with a list or a column."""
        if isinstance(other, array.array):
            return super().__eq__(other)
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __ne__(self, other: object) -> bool:
        """Compare as a list, with a list or a column."""
        return not self == other

    __hash__ = None  # it can be changed, as a list can

    def __bytes__(self) -> bytes:
        """Return a byte a number, as of a list; `tobytes` returns the memory."""
        return bytes(self.tolist())

    def __copy__(self) -> Compact:
        """Return a copy."""
        return Compact(self.typecode, self.tobytes())

    def __deepcopy__(self, memo: Any) -> Compact:
        """Return a copy."""
        return self.__copy__()

    def _joined(self, *parts: Sequence[Any]) -> Compact:
        joined = Compact(self.typecode)
        for part in parts:
            joined.extend(part)
        return joined

    def extend(self, values: Iterable[Any], /) -> None:
        """Append numbers, all or none."""
        is_alike = isinstance(values, array.array) and values.typecode == self.typecode
        _extend(self, values if is_alike else Compact(self.typecode, values))


#: A column of integers of a sample: token ids, or a mask.
Ints = list[int] | Compact
#: A column of numbers of a sample.
Floats = list[float] | Compact


def is_compact(column: object, typecode: str) -> TypeGuard[Compact]:
    """Return whether a column is a compact one of a type."""
    return isinstance(column, Compact) and column.typecode == typecode


def dtype_of(typecode: str) -> Any:
    """Return the numpy dtype of a type code."""
    return _DTYPES[typecode]


def view(values: Sequence[Any], typecode: str) -> np.ndarray[Any, Any]:
    """Return a column as an array: of a `Compact` its own memory, of a list a new one of the type code's dtype.

    Raises:
        TypeError: something in a list is no number of that type.
        OverflowError: a number is out of its range.
    """
    column = values if isinstance(values, Compact) else array.array(typecode, values)
    return np.frombuffer(column, dtype=_DTYPES[column.typecode])


def concatenated(columns: Sequence[Compact], typecode: str, memory: ReusedMemory) -> np.ndarray[Any, Any]:
    """Return compact columns of one type, one after the other, as a new array in that memory."""
    # Faster than numpy's concatenate, which makes an array of each; and large arrays of numpy's are given huge pages.
    flat, at = memory.empty(sum(map(len, columns)), _DTYPES[typecode]), 0
    for begin in range(0, len(columns), _JOINED):
        part = np.frombuffer(b"".join(columns[begin : begin + _JOINED]), dtype=flat.dtype)
        flat[at : at + len(part)] = part
        at += len(part)
    return flat


def joined(before: Sequence[Any], added: Sequence[Any] | np.ndarray[Any, Any], typecode: str) -> Any:
    """Return one column after the other: compact if one of them is and the numbers allow it, else a list.

    Args:
        before: a column, perhaps empty.
        added: what follows; also a numpy array.
        typecode: of the result; `FLOAT32` gives way to `FLOAT64` where numbers are of 64 bits.
    """
    if isinstance(added, np.ndarray):
        added = Compact(FLOAT64 if added.dtype == np.float64 else typecode, added)
    if is_compact(added, typecode):
        if not len(before):
            return _new(Compact, typecode, added)
        if typecode == IDS or is_compact(before, typecode):
            try:
                column = _new(Compact, typecode, before)
            except (TypeError, OverflowError):  # the sample's check says which number it is
                return [*before, *added]
            _extend(column, added)
            return column
    if not isinstance(before, Compact) and not isinstance(added, Compact):
        return [*before, *added]
    if typecode == FLOAT32 and not all(_is_float32(part) for part in (before, added)):
        typecode = FLOAT64
    try:
        column = Compact(typecode, before)
        column.extend(added)
    except (TypeError, OverflowError):  # the sample's check says which number it is
        return [*before, *added]
    return column


def _cast(values: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an array as another dtype that holds all its numbers."""
    if values.dtype == dtype:
        return values
    cast = values.astype(dtype)
    if not np.can_cast(values.dtype, dtype) and not np.array_equal(
        cast, values, equal_nan=cast.dtype.kind == "f"
    ):
        raise OverflowError(f"an array of {values.dtype} has numbers that {cast.dtype} cannot hold")
    return cast


def _is_float32(column: Sequence[Any]) -> bool:
    return not len(column) or is_compact(column, FLOAT32)
