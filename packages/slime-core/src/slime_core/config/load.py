"""Reading settings: defaults < numerics < recipes < flags. All problems are reported at once, each with where it stands.

In a recipe with stages a stage's own tables stand between the shared ones and the flags.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core.config.base import SectionModel
from slime_core.config.schema import Flag, Schema, build_schema, nearest
from slime_core.config.sections import ALIASES
from slime_core.config.settings import Settings
from slime_core.config.stages import STAGE, Stage, chain
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.elsewhere import SECTIONS
from slime_core.plugins.registry import Registry

_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass
class _Draft:
    """Values on their way into settings, where each came from, and what is wrong so far."""

    schema: Schema
    problems: list[Problem]
    values: dict[str, dict[str, Any]]
    origins: dict[tuple[str, str], str] = field(default_factory=dict)

    def put(self, table: str, field: str, value: Any, *, origin: str) -> None:
        """Set a value in the place of an earlier one."""
        self.values[table][field] = value
        self.origins[table, field] = origin

    def put_foreign(self, table: str, name: str, value: Any, *, origin: str) -> None:
        """Set a flag of another program beside those that a table has already."""
        held = self.schema.foreign[table].field
        self.put(table, held, {**self.values[table].get(held, {}), name: value}, origin=origin)

    def branch(self) -> _Draft:
        """Return a draft that goes on from here by itself; problems are those of both."""
        values = {table: dict(fields) for table, fields in self.values.items()}
        return _Draft(self.schema, self.problems, values, dict(self.origins))


def load_settings(
    recipes: Sequence[str], arguments: Sequence[str], *, registry: Registry, schema: Schema | None = None
) -> Settings:
    """Read recipes and flags into the settings of one run.

    Args:
        recipes: TOML files; later ones override earlier ones.
        arguments: flags, as typed; `--set section.key=value` reaches any key.
        registry: supplies the plugins' sections.
        schema: the sections, when they have been collected already.

    Raises:
        ConfigError: carries every problem found; a recipe with stages is one.
    """
    stages = load_stages(recipes, arguments, registry=registry, schema=schema)
    if stages[0].name:
        names = ", ".join(stage.name for stage in stages)
        raise ConfigError([Problem(" ".join(recipes), f"the stages {names}", "a recipe of one run")])
    return stages[0].settings


def load_stages(
    recipes: Sequence[str], arguments: Sequence[str], *, registry: Registry, schema: Schema | None = None
) -> list[Stage]:
    """Read recipes and flags into the runs that they are: one without a name, where there are no stages.

    Args are those of `load_settings`. A flag holds for every stage; `--set stage.NAME.section.key=value` for one.

    Raises:
        ConfigError: carries every problem found.
    """
    draft = _Draft(schema or build_schema(registry), [], {})
    draft.values.update({name: {} for name in draft.schema.models})
    own_tables: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for recipe in recipes:
        tables = _read(recipe, draft.problems)
        for name, own in _stage_tables(recipe, tables.pop(STAGE, {}), draft.problems):
            own_tables.setdefault(name, []).append((f"{recipe} [{STAGE}.{name}]", own))
        _merge_tables(draft, tables, registry, origin=recipe)
    if any(problem.where in recipes for problem in draft.problems):
        raise ConfigError(
            draft.problems
        )  # a recipe that cannot be read: what it would have set is not missing
    found: dict[str, Settings] = {}
    for name in own_tables or [""]:
        branch = draft.branch()
        for origin, own in own_tables.get(name, ()):
            _merge_tables(branch, own, registry, origin=origin)
        _merge_flags(branch, arguments, stage=name, stages=own_tables)
        _merge_numerics(branch, registry)
        found[name] = _validated(branch)
    if draft.problems:
        raise ConfigError(dict.fromkeys(draft.problems))  # stages share most, and what is wrong with it
    return chain(found)


def _read(recipe: str, problems: list[Problem]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(recipe).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(recipe, str(getattr(error, "strerror", None) or error), "a readable recipe"))
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem(recipe, f"broken TOML: {error}", "a TOML file"))
    return {}


def _stage_tables(
    recipe: str, tables: Any, problems: list[Problem]
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield (name, tables) of a recipe's stages, in its order."""
    wanted = f"tables [{STAGE}.NAME] with keys section.key"
    if not isinstance(tables, dict):
        problems.append(Problem(f"{recipe}: {STAGE}", type(tables).__name__, wanted))
        return
    for name, own in tables.items():
        if not isinstance(own, dict):
            problems.append(Problem(f"{recipe}: {STAGE}.{name}", repr(own), wanted))
        elif not _STAGE_NAME.fullmatch(name):
            named = "a name of letters, digits, - and _: it is a folder's"
            problems.append(Problem(f"{recipe}: [{STAGE}.{name!r}]", "it", named))
        else:
            yield name, own


def _merge_tables(draft: _Draft, tables: Mapping[str, Any], registry: Registry, *, origin: str) -> None:
    for name, table in tables.items():
        if name not in draft.schema.models or not isinstance(table, dict):
            broken = "".join(
                f"; {dist} failed to import: {why}" for dist, why in registry.broken_hooks.items()
            )
            where = f"{origin}: [{name}]" if isinstance(table, dict) else f"{origin}: {name}"
            wanted = nearest(name, draft.schema.models) + broken
            if home := SECTIONS.get(name):
                wanted = f"{home}, which brings it" + (broken or "; install it")
            draft.problems.append(Problem(where, "an unknown section", wanted))
            continue
        for key, value in table.items():
            _merge_key(draft, name, key, value, origin=origin)


def _merge_key(draft: _Draft, table: str, key: str, value: Any, *, origin: str) -> None:
    schema, field = draft.schema, ALIASES.get(key, key)
    fields, theirs = schema.models[table].model_fields, schema.foreign.get(table)
    if field in fields:
        draft.put(table, field, _plain_value(schema, table, field, value), origin=origin)
    elif theirs is not None and key in theirs.names:
        draft.put_foreign(table, key, value, origin=origin)
    else:
        elsewhere = [f"[{t}]" for t, m in schema.models.items() if field in m.model_fields]
        wanted = f"it in {elsewhere[0]}" if elsewhere else nearest(key, fields)
        draft.problems.append(Problem(f"{origin}: {table}.{key}", "an unknown key", wanted))


def _merge_flags(draft: _Draft, arguments: Sequence[str], *, stage: str, stages: Collection[str]) -> None:
    schema, problems = draft.schema, draft.problems
    for word, given in _split_flags(arguments, problems):
        if word == "--set":
            _merge_set(draft, given, stage=stage, stages=stages)
            continue
        flag, negated = _lookup(word, schema)
        if flag is None:
            theirs = schema.find_foreign(word[2:].replace("-", "_"))
            if theirs is None:
                near = schema.nearest_flag(word)
                problems.append(Problem(word, "an unknown flag", near, "see `slime config flags`"))
                continue
            table, _, name = theirs
            draft.put_foreign(table, name, _foreign_value(given), origin=word)
            continue
        try:
            draft.put(flag.table, flag.field, _flag_value(flag, given, negated=negated), origin=word)
        except ValueError as error:
            problems.append(Problem(word, f"{' '.join(given) or 'no value'}", str(error)))


def _merge_numerics(draft: _Draft, registry: Registry) -> None:
    """Let the chosen conventions fill what recipes and flags leave open."""
    name = draft.values["algorithm"].get("numerics")
    if name is None:
        return
    try:
        conventions: Mapping[str, Mapping[str, Any]] = registry.resolve("slime.numerics", name)
    except PluginError as error:
        draft.problems.append(Problem(draft.origins["algorithm", "numerics"], repr(name), str(error)))
        return
    for table, fields in conventions.items():
        for key, value in fields.items():
            if table not in draft.schema.models or key not in draft.schema.models[table].model_fields:
                where = f"numerics {name}: {table}.{key}"
                draft.problems.append(Problem(where, "an unknown setting", "a known one"))
            elif key not in draft.values[table]:
                draft.put(table, key, value, origin=f"numerics {name}")


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


def _merge_set(draft: _Draft, given: Sequence[str], *, stage: str, stages: Collection[str]) -> None:
    models = draft.schema.models
    for assignment in given or [""]:
        path, equals, text = assignment.partition("=")
        table, _, key = path.partition(".")
        if table == STAGE and stages:
            name, _, rest = key.partition(".")
            table, _, key = rest.partition(".")
            if name not in stages:
                wanted = f"{STAGE}.NAME.section.key=value; NAME is {nearest(name, stages)}"
                draft.problems.append(Problem("--set", repr(assignment), wanted))
                continue
            if name != stage:
                continue
        if not equals or table not in models or key not in models[table].model_fields:
            known = [f"{t}.{f}" for t, model in models.items() for f in model.model_fields]
            wanted = f"section.key=value; {nearest(f'{table}.{key}', known)}"
            draft.problems.append(Problem("--set", repr(assignment), wanted))
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a bare word is a string
        draft.put(table, key, _plain_value(draft.schema, table, key, value), origin=f"--set {path}")


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
    return _word_value(flag, given[0])


def _word_value(flag: Flag, word: str) -> Any:
    if flag.optional and word.lower() == "none":
        return None
    if flag.kind is dict:
        try:
            return json.loads(word)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON object ({error})") from error
    return word


def _plain_value(schema: Schema, table: str, field: str, value: Any) -> Any:
    """Return a value of a recipe, in which a string may stand for what TOML lacks, as in `Settings.to_toml`."""
    if not isinstance(value, str):
        return value
    flag = next(flag for flag in schema.flags.values() if (flag.table, flag.field) == (table, field))
    try:
        return _word_value(flag, value)
    except ValueError:
        return value  # it is refused as what it is


def _foreign_value(given: Sequence[str]) -> Any:
    """Return a foreign flag's words as they are: only its own program knows what they mean."""
    return True if not given else given[0] if len(given) == 1 else list(given)


def _validated(draft: _Draft) -> Settings:
    """Return the settings, without the sections in which something is wrong."""
    sections: dict[str, SectionModel] = {}
    for name, model in draft.schema.models.items():
        try:
            sections[name] = model.model_validate(draft.values[name])
        except ValidationError as error:
            draft.problems += [_problem(name, detail, draft) for detail in error.errors()]
    return Settings(sections, draft.origins, draft.schema.owners)


def _problem(table: str, detail: Mapping[str, Any], draft: _Draft) -> Problem:
    key = str(detail["loc"][0]) if detail["loc"] else ""
    origin = draft.origins.get((table, key))
    flags = draft.schema.flags.values()
    spelled = next((f.spelled for f in flags if (f.table, f.field) == (table, key)), "")
    where = (
        f"{origin}: {table}.{key}" if origin and not origin.startswith("--") else origin or f"{table}.{key}"
    )
    if detail["type"] == "missing":
        return Problem(where, "nothing", "a value", f"give {spelled} or set it in [{table}] of the recipe")
    message = str(detail["msg"])
    return Problem(where, repr(detail["input"]), message[0].lower() + message[1:])
