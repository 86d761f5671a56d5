"""Reading settings: defaults < numerics < recipes < flags. All problems are reported at once, each with where it stands.

In a recipe with stages a stage's own tables stand between the shared ones and the flags.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core.config.base import SectionModel, Unset
from slime_core.config.schema import Flag, Schema, build_schema, closest, nearest
from slime_core.config.sections import ALIASES, RIVALS
from slime_core.config.settings import Settings
from slime_core.config.stages import STAGE, Stage, chain
from slime_core.config.words import recipe_value, takes_bool, unfit_text, value_of, wanted
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.json_text import MAX_DEPTH, is_deep, shown
from slime_core.plugins.elsewhere import home_of_section
from slime_core.plugins.registry import Registry

_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass
class _Draft:
    """Values on their way into settings, where each came from, and what is wrong so far."""

    schema: Schema
    problems: list[Problem]
    values: dict[str, dict[str, Any]]
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    levels: dict[tuple[str, str], int] = field(default_factory=dict)
    """How late each value was given: recipes count one after the other, flags come last."""
    level: int = 0
    unset: set[tuple[str, str]] = field(default_factory=set)
    """Settings that something wrong was probably meant for."""

    def put(self, table: str, field: str, value: Any, *, origin: str) -> None:
        """Set a value in the place of an earlier one."""
        self.values[table][field] = value
        self.origins[table, field] = origin
        self.levels[table, field] = self.level

    def put_out(self) -> None:
        """Forget what rivals of later values say, where two settings choose one thing (`RIVALS`)."""
        for table, fields in RIVALS:
            given = {f: self.levels[table, f] for f in fields if self.values[table].get(f)}
            for key, level in given.items():
                if level < max(given.values()):
                    del self.values[table][key]
                    del self.origins[table, key]

    def put_foreign(self, table: str, name: str, value: Any, *, origin: str) -> None:
        """Set a flag of another program beside those that a table has already."""
        held = self.schema.foreign[table].field
        self.put(table, held, {**self.values[table].get(held, {}), name: value}, origin=origin)

    def branch(self) -> _Draft:
        """Return a draft that goes on from here by itself; problems are those of both."""
        values = {table: dict(fields) for table, fields in self.values.items()}
        return _Draft(
            self.schema,
            self.problems,
            values,
            dict(self.origins),
            dict(self.levels),
            self.level,
            set(self.unset),
        )


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
    stages, problems = read_runs(recipes, arguments, registry=registry, schema=schema)
    if problems:
        raise ConfigError(problems)
    return stages


def read_runs(
    recipes: Sequence[str], arguments: Sequence[str], *, registry: Registry, schema: Schema | None = None
) -> tuple[list[Stage], list[Problem]]:
    """Return the runs that recipes and flags are, and everything wrong with how they are written.

    Where something is wrong, the settings that are, or that a misspelt flag was probably meant for, have no value: asked for,
    they raise `Unset`. Whatever can be told without them can be told all the same, in one report. No run is returned of a
    recipe that cannot be read.
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
        return [], draft.problems  # what such a recipe would have set is not missing
    found: dict[str, Settings] = {}
    for name in own_tables or [""]:
        branch = draft.branch()
        for origin, own in own_tables.get(name, ()):
            _merge_tables(branch, own, registry, origin=origin)
        _merge_flags(branch, arguments, stage=name, stages=own_tables)
        branch.put_out()
        _merge_numerics(branch, registry)
        found[name] = _validated(branch)
    problems = list(dict.fromkeys(draft.problems))  # stages share most, and what is wrong with it
    try:
        return chain(found), problems
    except ConfigError as error:
        problems += error.problems
    except Unset:
        pass
    return [Stage(name, settings, settings) for name, settings in found.items()], problems


def _read(recipe: str, problems: list[Problem]) -> dict[str, Any]:
    why, wanted = "", "a TOML file"
    try:
        tables = tomllib.loads(Path(recipe).read_text(encoding="utf-8"))
        if not is_deep(tables):
            return tables
        why = f"tables or lists nested deeper than {MAX_DEPTH}"
    except RecursionError:
        why = f"tables or lists nested deeper than {MAX_DEPTH}"
    except tomllib.TOMLDecodeError as error:
        why = f"broken TOML: {str(error)[:300]}"
    except OSError as error:
        why, wanted = str(error.strerror or error), "a readable recipe"
    except UnicodeDecodeError as error:
        why, wanted = f"bytes that are not UTF-8 (at {error.start})", "a readable recipe"
    except (
        ValueError
    ):  # of Python's own: integers of thousands of digits, dates that are none, zero bytes in the path
        why = "a number or a date that cannot be read"
    problems.append(Problem(recipe, why, wanted))
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
    draft.level += 1
    for name, table in tables.items():
        if name not in draft.schema.models or not isinstance(table, dict):
            broken = "".join(
                f"; {dist} failed to import: {why}" for dist, why in registry.broken_hooks.items()
            )
            where = f"{origin}: [{name}]" if isinstance(table, dict) else f"{origin}: {name}"
            wanted = nearest(name, draft.schema.models) + broken
            if not isinstance(table, dict) and name in draft.schema.models:
                wanted = f"a table: [{name}]"
            if home := home_of_section(name):
                wanted = f"{home}, which brings it" + (broken or "; install it")
            draft.problems.append(Problem(where, "an unknown section", wanted))
            if (meant := closest(name, draft.schema.models)) and isinstance(table, dict):
                draft.unset |= {(meant, key) for key in table}
            continue
        for key, value in table.items():
            _merge_key(draft, name, key, value, origin=origin)


def _merge_key(draft: _Draft, table: str, key: str, value: Any, *, origin: str) -> None:
    schema, field = draft.schema, ALIASES.get(key, key)
    fields, theirs = schema.models[table].model_fields, schema.foreign.get(table)
    if field in fields:
        draft.put(table, field, recipe_value(schema.flag_of(table, field).annotation, value), origin=origin)
    elif theirs is not None and key in theirs.names:
        draft.put_foreign(table, key, value, origin=origin)
    else:
        elsewhere = [t for t, m in schema.models.items() if field in m.model_fields]
        wanted = f"it in [{elsewhere[0]}]" if elsewhere else nearest(key, fields)
        if elsewhere:
            draft.unset.add((elsewhere[0], field))
        elif meant := closest(key, fields):
            draft.unset.add((table, meant))
        draft.problems.append(Problem(f"{origin}: {table}.{key}", "an unknown key", wanted))


def _merge_flags(draft: _Draft, arguments: Sequence[str], *, stage: str, stages: Collection[str]) -> None:
    schema, problems = draft.schema, draft.problems
    draft.level += 1
    for word, given in _split_flags(arguments, problems):
        if word == "--set":
            _merge_set(draft, given, stage=stage, stages=stages)
            continue
        flag, negated = _lookup(word, schema)
        if flag is None:
            theirs = schema.find_foreign(word[2:].replace("-", "_"))
            if theirs is None:
                near, meant = schema.meant_by(word)
                problems.append(Problem(word, "an unknown flag", near, "see `slime config flags`"))
                if meant is not None:
                    draft.unset.add((meant.table, meant.field))
                continue
            table, _, name = theirs
            draft.put_foreign(table, name, _foreign_value(given), origin=word)
            continue
        try:
            draft.put(flag.table, flag.field, _flag_value(flag, given, negated=negated), origin=word)
        except ValueError as error:
            problems.append(Problem(word, shown(" ".join(given)) if given else "no value", str(error)))
            draft.unset.add((flag.table, flag.field))


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
            draft.problems.append(Problem("--set", shown(assignment), wanted))
            if meant := closest(f"{table}.{key}", known):
                draft.unset.add((meant.partition(".")[0], meant.partition(".")[2]))
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text  # a bare word is a string
        value = recipe_value(draft.schema.flag_of(table, key).annotation, value)
        draft.put(table, key, value, origin=f"--set {path}")


def _lookup(word: str, schema: Schema) -> tuple[Flag | None, bool]:
    name = word[2:].replace("-", "_")
    name = ALIASES.get(name, name)
    if name in schema.flags:
        return schema.flags[name], False
    positive = schema.flags.get(name.removeprefix("no_")) if name.startswith("no_") else None
    return (positive, True) if positive is not None and positive.is_switch else (None, False)


def _flag_value(flag: Flag, given: Sequence[str], *, negated: bool) -> Any:
    if flag.is_switch and not given:
        return not negated
    if negated:
        raise ValueError("no value after a --no- flag")
    return value_of(flag.annotation, given)


def _foreign_value(given: Sequence[str]) -> Any:
    """Return a foreign flag's words as they are: only its own program knows what they mean."""
    return True if not given else given[0] if len(given) == 1 else list(given)


def _validated(draft: _Draft) -> Settings:
    """Return the settings; those in which something is wrong, or that a mistake was meant for, without a value."""
    sections: dict[str, SectionModel] = {}
    for name, model in draft.schema.models.items():
        meant = {field for table, field in draft.unset if table == name}
        found = {field: _unfit(draft, name, field, value) for field, value in draft.values[name].items()}
        draft.problems += [problem for problem in found.values() if problem is not None]
        unset = meant | {field for field, problem in found.items() if problem is not None}
        try:
            sections[name] = model.model_validate(draft.values[name], strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                field = str(detail["loc"][0])
                if not found.get(field) and not (detail["type"] == "missing" and field in meant):
                    draft.problems.append(_problem(draft, name, field, detail))
                unset.add(field)
        if unset:
            sections[name] = _without(model, draft.values[name], unset)
    return Settings(sections, draft.origins, draft.schema.owners)


def _without(model: type[SectionModel], values: Mapping[str, Any], unset: Collection[str]) -> SectionModel:
    """Return a section in which some settings have no value; nobody but checks gets to see it."""
    section = model.model_construct(**{key: value for key, value in values.items() if key not in unset})
    for key in unset:
        vars(section).pop(key, None)
    return section


def _unfit(draft: _Draft, table: str, field: str, value: Any) -> Problem | None:
    """Return what is wrong with a value that its type does not tell."""
    annotation = draft.schema.flag_of(table, field).annotation
    if isinstance(value, bool) and not takes_bool(annotation):
        return Problem(_where(draft, table, field), str(value).lower(), wanted(annotation))
    if why := unfit_text(value):
        return Problem(_where(draft, table, field), f"{shown(value)}, with {why}", "text without it")
    return None


def _problem(draft: _Draft, table: str, field: str, detail: Mapping[str, Any]) -> Problem:
    """Say what is wrong with a value in our words; a field's own check says what it wants."""
    flag = draft.schema.flag_of(table, field)
    where = _where(draft, table, field, *detail["loc"][1:])
    if detail["type"] == "missing":
        todo = f"give {flag.spelled} or set it in [{table}] of the recipe"
        return Problem(where, "nothing", "a value", todo)
    own = detail["type"] == "value_error"
    said = str(detail["msg"]).removeprefix("Value error, ") if own else wanted(flag.annotation)
    return Problem(where, shown(detail["input"]), said)


def _where(draft: _Draft, table: str, field: str, *inside: Any) -> str:
    origin = draft.origins.get((table, field))
    path = ".".join([table, field, *map(str, inside)])
    if origin is None or origin.startswith("--"):
        return origin or path
    return f"{origin}: {path}"
