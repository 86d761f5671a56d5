"""What a reward may return, and its conversion to a score or a typed failure."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FailureKind = Literal["raised", "deadline", "crashed", "invalid"]

_WANTED = "a reward returns a finite number, a Grade, or a dict of JSON values"


_DEEPEST = 100

SCORE = "score"
"""Entry of a reward dict that is the score, unless `reward_key` names another."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a reward may return to say more than a number; becomes the dict `{score, **parts, details}`."""

    score: float
    """The score."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, which `--reward-key` can choose and whose means are metrics."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Why: JSON values for people, such as the answer that was found."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A score."""

    score: float | None
    """The number; None when the reward returned a dict without `score`, of which `reward_key` picks an entry."""
    value: float | dict[str, Any]
    """What the reward returned: a finite float, or a dict of JSON values without NaN and infinity."""
    seconds: float
    """Time that the reward ran; for one of a group, the group's time over its size."""


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """Why there is no score. It is never turned into a number."""

    kind: FailureKind
    """It `raised`, missed its `deadline`, `crashed` its process, or returned something `invalid`."""
    message: str
    """Names the sample and the reward, and says what happened."""


@dataclass(frozen=True)
class Failed:
    """A failure before it has been given a sample's name: `what` continues "the reward ..."."""

    kind: FailureKind
    what: str


#: A plain value, or why there is none.
Outcome = float | dict[str, Any] | Failed


def plain_value(returned: Any) -> Outcome:
    """Turn what a reward returned into plain JSON values.

    Numbers of any library (zero-dimensional arrays and tensors as well) become floats, bools become 0.0 or
    1.0; inside a dict ints and bools stay, and tuples become lists.
    """
    if type(returned) is float and math.isfinite(returned):
        return returned
    try:
        if isinstance(returned, Grade):
            returned = _as_dict(returned)
        if isinstance(returned, Mapping):
            return {_key(key): _plain(value, f"[{key!r}]") for key, value in returned.items()}
        value = _plain(returned, "")
    except ValueError as error:
        return Failed("invalid", f"returned {error}; {_WANTED}")
    if isinstance(value, int | float):  # bool is an int
        return float(value)
    return Failed("invalid", f"returned {_show(returned)}; {_WANTED}")


def group_values(returned: Any, count: int) -> list[Outcome]:
    """Turn what a group reward returned for `count` samples into one outcome each, in order."""
    items = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        failed = Failed("invalid", f"returned {_show(returned)}; a group reward returns a list")
    elif len(items) != count:
        failed = Failed(
            "invalid", f"returned {len(items)} scores for a group of {count}; return one each, in order"
        )
    else:
        return [plain_value(item) for item in items]
    return [failed] * count


def score_of(value: float | dict[str, Any]) -> float | None:
    """Return the number that a plain value is, or that its `score` is; None for any other dict."""
    number = value.get(SCORE) if isinstance(value, dict) else value
    return float(number) if isinstance(number, int | float) else None


def _as_dict(grade: Grade) -> dict[str, Any]:
    reserved = {SCORE, "details"} & set(grade.parts)
    if reserved:
        raise ValueError(f"a Grade with the part {sorted(reserved)[0]!r}, a name that is taken")
    why = {"details": dict(grade.details)} if grade.details else {}
    return {SCORE: grade.score, **grade.parts, **why}


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"a dict with the key {_show(key)}, keys are text")
    return _text(key, "")


def _text(value: str, path: str) -> str:
    text = str(value)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"text with a lone surrogate{_at(path)}")
    return text


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """Return `value` as JSON values; ValueError says what cannot be."""
    if depth > _DEEPEST:
        raise ValueError(f"a value nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        return _text(value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, numbers.Real) and hasattr(value, "tolist"):  # an array or a tensor
        return _plain(value.tolist(), path, depth + 1)
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{_show(value)}{_at(path)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"an integer too large for a float{_at(path)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}{_at(path)}")
    return int(value) if path and isinstance(value, numbers.Integral) else number


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _show(value: Any) -> str:
    """Name a value by its type, and itself where that is short and safe."""
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, str | bytes | bool | int) else ""
    return f"{type(value).__name__} {text[:60]}".rstrip()
