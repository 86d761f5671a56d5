"""Reading a configuration of verl: a YAML file of Hydra's, and overrides behind it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import shown
from slime_core.files.strict_read import read_text

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
#: Most references that lead from one to the next.
_MOST = 20


def read_config(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration as dotted keys and their values, references resolved, as `oc.select` and `oc.env`.

    Args:
        path: YAML; None for overrides alone.
        overrides: `key=value`, `+key=value`, `~key`.

    Raises:
        ConfigError: the file is not there or no YAML, or an override or a reference is none; names all of them.
    """
    found = dict(_flat(_file(path))) if path is not None else {}
    problems: list[Problem] = []
    for word in overrides:
        match = _OVERRIDE.fullmatch(word)
        if match is None or (match[3] is None and match[1] != "~"):
            problems.append(Problem("override", shown(word), "key=value, as actor_rollout_ref.rollout.n=8"))
            continue
        name = match[2]
        for key in [key for key in found if key == name or key.startswith(f"{name}.")]:
            del found[key]
        if match[1] == "~":
            continue
        try:
            found |= dict(_flat(_value(match[3]), name))
        except yaml.YAMLError as error:
            problems.append(
                Problem(f"override {name}", shown(match[3]), f"a value ({' '.join(str(error).split())})")
            )
    resolved = {key: _resolved(key, value, found, problems) for key, value in found.items()}
    if problems:
        raise ConfigError(problems)
    resolved.pop("defaults", None)
    return {key: value for key, value in resolved.items() if not key.startswith("hydra.")}


def _file(path: Path) -> Mapping[str, Any]:
    try:
        given = yaml.load(read_text(path), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError([Problem(str(path), why, "a YAML file of verl's settings")]) from error
    if not isinstance(given, dict):
        raise ConfigError([Problem(str(path), f"a {type(given).__name__}", "a table of settings")])
    return given


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no type information
    """YAML as Hydra reads it: 1e-6 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _value(text: str) -> Any:
    return yaml.load(text, Loader=_Loader) if text != "" else ""


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything within tables; an empty table is a value."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _resolved(key: str, value: Any, found: Mapping[str, Any], problems: list[Problem]) -> Any:
    for _ in range(_MOST):
        if not isinstance(value, str) or (match := _REFERENCE.search(value)) is None:
            return value
        try:
            meant = _meant(match[1], found)
        except KeyError:
            problems.append(
                Problem(key, value, f"a key that is there: {match[1]} is not", "give it as an override")
            )
            return value
        value = meant if match[0] == value else value.replace(match[0], str(meant))
    problems.append(Problem(key, shown(value), "references that come to an end"))
    return value


def _meant(text: str, found: Mapping[str, Any]) -> Any:
    """Return what stands behind a reference."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return found[text.strip()]
    name, comma, default = rest.partition(",")
    if kind == "oc.select":
        return found[name.strip()] if name.strip() in found or not comma else _value(default.strip())
    if kind == "oc.env":
        return (
            os.environ[name.strip()] if name.strip() in os.environ or not comma else _value(default.strip())
        )
    raise KeyError(text)
