"""Parsing values of settings from the command line and recipes, and describing the values that a setting takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from slime_core.files.json_text import parse_json, why_not_text

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
#: Bound -> (its attribute, how it is said).
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "more than"), Le: ("le", "at most"), Lt: ("lt", "less than")}
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a table of keys and values",
}
#: Bounds that only avoid overflow are shown to who is beyond them: no sensible value is.
_TELLING = 1e8


def annotation_of(info: FieldInfo) -> Any:
    """Return the type of a field with its bounds."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def value_of(annotation: Any, words: Sequence[str]) -> Any:
    """Return what the words after a flag, or a string in a recipe, stand for; what fits nothing stays text.

    Raises:
        ValueError: says what is wanted instead.
    """
    kinds = list(_kinds(annotation))
    if NoneType in kinds and [word.lower() for word in words] == ["none"]:
        return None
    lists = [kind for kind in kinds if get_origin(kind) is list or kind is list]
    if lists:
        (each,) = get_args(lists[0]) or (str,)
        if (get_origin(each) or each) is dict and len(words) == 1 and words[0].lstrip().startswith("["):
            return _json(words[0], "list")
        return [value_of(each, [word]) for word in words]
    if len(words) != 1:
        raise ValueError("one value")
    (word,) = words
    for kind in kinds:
        is_one, value = _read(kind, word)
        if is_one:
            return value
    return word


def recipe_value(annotation: Any, value: Any) -> Any:
    """Return a recipe's value, in which text may stand for what TOML lacks: none, a path, a table or list with a null in it."""
    if not isinstance(value, str):
        return value
    kinds = list(_kinds(annotation))
    if NoneType in kinds and value.lower() == "none":
        return None
    for kind in kinds:
        try:
            if kind is Path or (get_origin(kind) or kind) is dict:
                return _read(kind, value)[1]
            if get_origin(kind) is list and any(get_origin(each) is dict for each in get_args(kind)):
                return parse_json(value)
        except ValueError:
            pass  # it is refused as the text that it is
    return value


def _read(kind: Any, word: str) -> tuple[bool, Any]:
    """Return whether a word is of a kind, and its value."""
    if get_origin(kind) is dict or kind is dict:
        return True, _json(word, "object")
    if get_origin(kind) is Literal:
        named = {str(option): option for option in get_args(kind)}
        return word in named, named.get(word)
    if kind is bool:
        return word.lower() in (*_TRUE, *_FALSE), word.lower() in _TRUE
    if kind in (int, float, Path):
        try:
            return True, kind(os.path.expanduser(word) if kind is Path else word)
        except ValueError:
            return False, None
    return False, None


def _json(word: str, kind: str) -> Any:
    try:
        return parse_json(word)
    except ValueError as error:
        raise ValueError(f"a JSON {kind} ({error})") from error


def takes_bool(annotation: Any) -> bool:
    """Return whether true or false is a value."""
    return any(
        kind in (bool, Any)
        or (get_origin(kind) is Literal and any(isinstance(o, bool) for o in get_args(kind)))
        for kind in _kinds(annotation)
    )


def wanted(annotation: Any, found: Any = None) -> str:
    """Say what values a type takes: `a whole number of at least 1`; the bounds that avoid overflow where what was found is beyond."""
    said = [_wanted_of(kind, found) for kind in _variants(annotation) if kind is not NoneType]
    if NoneType in list(_kinds(annotation)):
        said.append("none")
    return " or ".join(said).replace(" or none", ", or none")


def _wanted_of(annotation: Any, found: Any) -> str:
    kind, bounds = annotation, []
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        bounds = [bound for bound in metadata if type(bound) in _BOUNDS]
        if any(isinstance(bound, MinLen) for bound in metadata):
            return "text that is not empty"
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is list:
        return f"a list, each of it {wanted(get_args(kind)[0])}"
    if origin is dict and get_args(kind)[1] is not Any:
        return f"a table, each value of it {wanted(get_args(kind)[1])}"
    is_beyond = isinstance(found, int | float) and abs(found) >= _TELLING
    said = [
        f"{word} {limit if isinstance(limit, int) else f'{limit:g}'}"
        for word, limit in map(_limit, bounds)
        if is_beyond or abs(limit) < _TELLING
    ]
    name = _NAMES.get(origin or kind, str(kind))
    return f"{name} of {' and '.join(said)}" if said else name


def _limit(bound: Any) -> tuple[str, float]:
    attribute, word = _BOUNDS[type(bound)]
    return word, getattr(bound, attribute)


def _variants(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, with their bounds, or the type itself."""
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    if get_origin(annotation) is Annotated and get_origin(get_args(annotation)[0]) in (Union, UnionType):
        return get_args(get_args(annotation)[0])
    return (annotation,)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that values may have, without bounds."""
    for variant in _variants(annotation):
        yield get_args(variant)[0] if get_origin(variant) is Annotated else variant


def unfit_text(value: Any) -> str | None:
    """Return why some text within a value cannot be used anywhere: half a character, or a zero byte; None if all can."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str) and (why := why_not_text(entry)):
            return why
        if isinstance(entry, dict):
            waiting += [*entry, *entry.values()]
        elif isinstance(entry, list | tuple):
            waiting += entry
    return None
