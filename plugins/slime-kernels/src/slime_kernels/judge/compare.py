"""Comparing a candidate's answers with the reference's, from their bytes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Type of an answer -> (relative, absolute) tolerance. The relative one is of a number, or of the median of those that are not 0 where the
#: number is smaller: what is left where terms cancel is as exact as the terms. A mean would be what a few large numbers are.
TOLERANCES = {
    "float64": (1e-6, 1e-7),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


def difference(
    found: Any, wanted: Any, found_bytes: Sequence[bytes], wanted_bytes: Sequence[bytes]
) -> str | None:
    """Return how an answer differs from the reference's; None where it does not.

    Args:
        found: the candidate's answer, as `values.encode` writes it.
        wanted: the reference's.
        found_bytes: buffers of the former.
        wanted_bytes: buffers of the latter.
    """
    ours, theirs = list(_leaves(found)), list(_leaves(wanted))
    if len(ours) != len(theirs):
        return f"{len(ours)} results; wanted {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if "value" in one or "value" in other:
            if one.get("value", one) != other.get("value", other):
                return "another value than a tensor; wanted what Model returns"
            continue
        for what in ("shape", "dtype"):
            if one[what] != other[what]:
                return f"{what} {one[what]}; wanted {other[what]}"
        why = _differs(found_bytes[one["buffer"]], wanted_bytes[other["buffer"]], one["dtype"])
        if why is not None:
            return why
    return None


def _leaves(form: Any) -> Any:
    for kind in ("list", "tuple"):
        if kind in form:
            for one in form[kind]:
                yield from _leaves(one)
            return
    yield form


def _differs(found: bytes, wanted: bytes, dtype: str) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} bytes; wanted {len(wanted)}"
    if dtype not in TOLERANCES:
        n = int((np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)).sum())
        return f"values of {dtype} that are not those of Model" if n else None
    ours, theirs = _floats(found, dtype), _floats(wanted, dtype)
    same = _same(ours, theirs, *TOLERANCES[dtype])
    if same.all():
        return None
    n = int((~same).sum())
    first = int(np.flatnonzero(~same)[0])
    return (
        f"{n} of {same.size} numbers are not those of Model, the first at {first}: "
        f"{ours[first]:.6g}; wanted {theirs[first]:.6g}"
    )


def _same(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], relative: float, absolute: float
) -> NDArray[np.bool_]:
    """Return which numbers are the reference's, to a tolerance as in `TOLERANCES`."""
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(theirs)
        sizes = np.abs(theirs)
        typical = float(np.median(sizes[finite & (sizes > 0)])) if (finite & (sizes > 0)).any() else 0.0
        close = np.abs(ours - theirs) <= absolute + relative * np.maximum(sizes, typical)
        return np.where(finite, close, (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))


def _floats(content: bytes, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        upper = np.frombuffer(content, np.uint16).astype(np.uint32) << 16
        return upper.view(np.float32).astype(np.float64)
    return np.frombuffer(content, np.dtype(dtype)).astype(np.float64)


#: What sums in float32 add to a relative tolerance at full size, where more terms are summed than in trials. A sum of K terms of no order, one
#: after the other, is off by 0.41 u sqrt(K) of its size (u = 2^-24: each partial sum is rounded, and they grow as sqrt(k)); two orders differ
#: by sqrt(2) of that, the worst of thousands of numbers by 4 times that, and the median of numbers is 0.67 of their size: 3.4 u sqrt(K), at
#: K = 2^20. TF32 and float16 round to 2^-11, so that products of them are off by 4e-4 of the median, however many are summed.
_SUMMED = 3.4 * 2**-24 * 2**10
_SUMS_IN_FLOAT32 = frozenset({"float32", "float16", "bfloat16"})


def same_at_places(found: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    """Return how tensors differ from the reference's in shape, type, or the numbers at some places; None where they do not.

    Args:
        found: of each tensor its `shape`, `dtype` and `numbers`.
        wanted: the reference's.
    """
    if len(found) != len(wanted):
        return f"{len(found)} tensors; wanted {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        for what in ("shape", "dtype"):
            if one[what] != other[what]:
                return f"{what} {one[what]}; wanted {other[what]}"
        ours, theirs = (np.array(each["numbers"], np.float64) for each in (one, other))
        if ours.shape != theirs.shape:
            return f"{ours.size} numbers; wanted {theirs.size}"
        same = _same(ours, theirs, *_at_full_size(one["dtype"].removeprefix("torch.")))
        if not same.all():
            return f"{int((~same).sum())} of {same.size} numbers are not those of Model"
    return None


def _at_full_size(dtype: str) -> tuple[float, float]:
    """Return the (relative, absolute) tolerance of a type where a problem has its own size; none of types that are compared exactly."""
    relative, absolute = TOLERANCES.get(dtype, (0.0, 0.0))
    return (relative, absolute) if dtype not in _SUMS_IN_FLOAT32 else (relative + _SUMMED, absolute)
