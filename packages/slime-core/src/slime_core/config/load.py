"""Reading settings: defaults < numerics < recipes < flags. All problems are reported at once, each with where it stands."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core.config.base import SectionModel
from slime_core.config.schema import Flag, Schema, build_schema, nearest
from slime_core.config.sections import ALIASES
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.registry import Registry


def load_settings(
    recipes: Sequence[str], arguments: Sequence[str], *, registry: Registry, schema: Schema | None = None
) -> Settings:
    """Read recipes and flags into settings.

    Args:
        recipes: TOML files; later ones override earlier ones.
        arguments: flags, as typed; `--set section.key=value` reaches any key.
        registry: supplies the plugins' sections.
        schema: the sections, when they have been collected already.

    Raises:
        ConfigError: carries every problem found.
    """
    schema = schema or build_schema(registry)
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {name: {} for name in schema.models}
    origins: dict[tuple[str, str], str] = {}
    for recipe in recipes:
        _merge_recipe(recipe, schema, values, origins, problems, registry)
    if any(problem.where in recipes for problem in problems):
        raise ConfigError(problems)  # a recipe that cannot be read: what it would have set is not missing
    _merge_flags(arguments, schema, values, origins, problems)
    _merge_numerics(schema, values, origins, problems, registry)
    sections: dict[str, SectionModel] = {}
    for name, model in schema.models.items():
        try:
            sections[name] = model.model_validate(values[name])
        except ValidationError as error:
            problems += [_problem(name, detail, origins, schema) for detail in error.errors()]
    if problems:
        raise ConfigError(problems)
    return Settings(sections, origins, schema.owners)


def _merge_recipe(
    recipe: str,
    schema: Schema,
    values: dict[str, dict[str, Any]],
    origins: dict[tuple[str, str], str],
    problems: list[Problem],
    registry: Registry,
) -> None:
    try:
        tables = tomllib.loads(Path(recipe).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(recipe, str(getattr(error, "strerror", None) or error), "a readable recipe"))
        return
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem(recipe, f"broken TOML: {error}", "a TOML file"))
        return
    for name, table in tables.items():
        if name not in schema.models or not isinstance(table, dict):
            broken = "".join(
                f"; {dist} failed to import: {why}" for dist, why in registry.broken_hooks.items()
            )
            where = f"{recipe}: [{name}]" if isinstance(table, dict) else f"{recipe}: {name}"
            problems.append(Problem(where, "an unknown section", nearest(name, schema.models) + broken))
            continue
        fields = schema.models[name].model_fields
        for key, value in table.items():
            field = ALIASES.get(key, key)
            theirs = schema.foreign.get(name)
            if field not in fields and theirs is not None and key in theirs.names:
                values[name][theirs.field] = {**values[name].get(theirs.field, {}), key: value}
                origins[name, theirs.field] = recipe
                continue
            if field not in fields:
                elsewhere = [f"[{t}]" for t, m in schema.models.items() if field in m.model_fields]
                wanted = f"it in {elsewhere[0]}" if elsewhere else nearest(key, fields)
                problems.append(Problem(f"{recipe}: {name}.{key}", "an unknown key", wanted))
                continue
            values[name][field] = value
            origins[name, field] = recipe


def _merge_flags(
    arguments: Sequence[str],
    schema: Schema,
    values: dict[str, dict[str, Any]],
    origins: dict[tuple[str, str], str],
    problems: list[Problem],
) -> None:
    for word, given in _split_flags(arguments, problems):
        if word == "--set":
            _merge_set(given, schema, values, origins, problems)
            continue
        flag, negated = _lookup(word, schema)
        if flag is None:
            theirs = schema.find_foreign(word[2:].replace("-", "_"))
            if theirs is None:
                near = nearest(word, [*schema.spellings, "--set"])
                problems.append(Problem(word, "an unknown flag", near, "see `slime config flags`"))
                continue
            table, field, name = theirs
            held = values[table].get(field, {})
            values[table][field] = {**held, name: _foreign_value(given)}
            origins[table, field] = word
            continue
        try:
            values[flag.table][flag.field] = _flag_value(flag, given, negated=negated)
        except ValueError as error:
            problems.append(Problem(word, f"{' '.join(given) or 'no value'}", str(error)))
            continue
        origins[flag.table, flag.field] = word


def _merge_numerics(
    schema: Schema,
    values: dict[str, dict[str, Any]],
    origins: dict[tuple[str, str], str],
    problems: list[Problem],
    registry: Registry,
) -> None:
    """Let the chosen conventions fill what recipes and flags leave open."""
    name = values["algorithm"].get("numerics")
    if name is None:
        return
    try:
        conventions: Mapping[str, Mapping[str, Any]] = registry.resolve("slime.numerics", name)
    except PluginError as error:
        problems.append(Problem(origins["algorithm", "numerics"], repr(name), str(error)))
        return
    for table, fields in conventions.items():
        for field, value in fields.items():
            if table not in schema.models or field not in schema.models[table].model_fields:
                problems.append(
                    Problem(f"numerics {name}: {table}.{field}", "an unknown setting", "a known one")
                )
            elif field not in values[table]:
                values[table][field] = value
                origins[table, field] = f"numerics {name}"


def _split_flags(arguments: Sequence[str], problems: list[Problem]) -> Iterable[tuple[str, list[str]]]:
    """Group the words into (flag, its values)."""
    grouped: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            word, equals, value = argument.partition("=")
            grouped.append((word, [value] if equals else []))
        elif grouped:
            grouped[-1][1].append(argument)
        else:
            problems.append(Problem(argument, "a word that belongs to no flag", "a flag before it"))
    return grouped


def _merge_set(
    given: Sequence[str],
    schema: Schema,
    values: dict[str, dict[str, Any]],
    origins: dict[tuple[str, str], str],
    problems: list[Problem],
) -> None:
    for assignment in given or [""]:
        path, equals, text = assignment.partition("=")
        table, _, field = path.partition(".")
        if not equals or table not in schema.models or field not in schema.models[table].model_fields:
            known = [f"{t}.{f}" for t, model in schema.models.items() for f in model.model_fields]
            problems.append(Problem("--set", repr(assignment), f"section.key=value; {nearest(path, known)}"))
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a bare word is a string
        values[table][field] = value
        origins[table, field] = f"--set {path}"


def _lookup(word: str, schema: Schema) -> tuple[Flag | None, bool]:
    name = word[2:].replace("-", "_")
    name = ALIASES.get(name, name)
    if name in schema.flags:
        return schema.flags[name], False
    positive = schema.flags.get(name.removeprefix("no_")) if name.startswith("no_") else None
    return (positive, True) if positive is not None and positive.kind is bool else (None, False)


def _flag_value(flag: Flag, given: Sequence[str], *, negated: bool) -> Any:
    if flag.kind is bool and not given:
        return not negated
    if negated:
        raise ValueError("no value after a --no- flag")
    if flag.kind is list:
        return list(given)
    if len(given) != 1:
        raise ValueError("one value")
    if flag.kind is dict:
        try:
            return json.loads(given[0])
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON object ({error})") from error
    return None if given[0].lower() == "none" and flag.optional else given[0]


def _foreign_value(given: Sequence[str]) -> Any:
    """Return a foreign flag's words as they are: only its own program knows what they mean."""
    return True if not given else given[0] if len(given) == 1 else list(given)


def _problem(
    table: str, detail: Mapping[str, Any], origins: Mapping[tuple[str, str], str], schema: Schema
) -> Problem:
    field = str(detail["loc"][0]) if detail["loc"] else ""
    origin = origins.get((table, field))
    spelled = next((f.spelled for f in schema.flags.values() if (f.table, f.field) == (table, field)), "")
    where = (
        f"{origin}: {table}.{field}"
        if origin and not origin.startswith("--")
        else origin or f"{table}.{field}"
    )
    if detail["type"] == "missing":
        return Problem(where, "nothing", "a value", f"give {spelled} or set it in [{table}] of the recipe")
    message = str(detail["msg"])
    return Problem(where, repr(detail["input"]), message[0].lower() + message[1:])
