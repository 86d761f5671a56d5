"""Reading settings: defaults < translation < numerics < recipes < flags. All problems are reported at once, each with where it stands.

In a recipe with stages a stage's own tables stand between the shared ones and the flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.base import Unset
from slime_core.config.parsing.draft import Draft
from slime_core.config.parsing.flags import merge_flags
from slime_core.config.parsing.recipes import merge_tables, read_recipe, stage_tables
from slime_core.config.parsing.schema import Schema, build_schema
from slime_core.config.parsing.translation import Translation
from slime_core.config.parsing.validation import validated
from slime_core.config.settings import Settings
from slime_core.config.stages import STAGE, Stage, chain
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.files.json_text import shown
from slime_core.plugins.registry import Registry


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
    recipes: Sequence[str],
    arguments: Sequence[str],
    *,
    registry: Registry,
    schema: Schema | None = None,
    translation: Translation | None = None,
) -> list[Stage]:
    """Read recipes and flags into the runs of a recipe: one without a name if it has no stages.

    Args are those of `load_settings`, and `translation`: of the command line that recipes and flags are taken from, whose defaults
    then hold, and whose problems are told. A flag holds for every stage; `--set stage.NAME.section.key=value` for one.

    Raises:
        ConfigError: carries every problem found.
    """
    stages, problems = read_runs(
        recipes, arguments, registry=registry, schema=schema, translation=translation
    )
    if problems:
        raise ConfigError(problems)
    return stages


def read_runs(
    recipes: Sequence[str],
    arguments: Sequence[str],
    *,
    registry: Registry,
    schema: Schema | None = None,
    translation: Translation | None = None,
) -> tuple[list[Stage], list[Problem]]:
    """Return the runs of recipes and flags, and every problem in how they are written.

    Where something is wrong, the settings that are, or that a misspelt flag was probably meant for, have no value: asked for,
    they raise `Unset`. Whatever can be checked without them is still checked, and reported together. No run is returned of a
    recipe that cannot be read.
    """
    draft = Draft(schema or build_schema(registry), [], {})
    draft.values.update({name: {} for name in draft.schema.models})
    draft.problems += translation.problems if translation is not None else ()
    own_tables: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for recipe in recipes:
        tables = read_recipe(recipe, draft.problems)
        for name, own in stage_tables(recipe, tables.pop(STAGE, {}), draft.problems):
            own_tables.setdefault(name, []).append((f"{recipe} [{STAGE}.{name}]", own))
        merge_tables(draft, tables, registry, origin=recipe)
    if any(problem.where in recipes for problem in draft.problems):
        return [], draft.problems  # what such a recipe would have set is not missing
    found: dict[str, Settings] = {}
    for name in own_tables or [""]:
        branch = draft.branch()
        for origin, own in own_tables.get(name, ()):
            merge_tables(branch, own, registry, origin=origin)
        merge_flags(branch, arguments, stage=name, stages=own_tables)
        branch.put_out()
        _merge_numerics(branch, registry)
        if translation is not None:
            _fill(branch, translation.defaults, origin=translation.origin)
        found[name] = validated(branch)
    problems = list(dict.fromkeys(draft.problems))  # stages share most, and what is wrong with it
    try:
        return chain(found), problems
    except ConfigError as error:
        problems += error.problems
    except Unset:
        pass
    return [Stage(name, settings, settings) for name, settings in found.items()], problems


def _merge_numerics(draft: Draft, registry: Registry) -> None:
    """Fill settings that neither recipes nor flags give from the conventions of `--numerics`."""
    name = draft.values["algorithm"].get("numerics")
    if name is None:
        return
    try:
        conventions: Mapping[str, Any] = registry.resolve("slime.numerics", name)
    except PluginError as error:
        draft.problems.append(Problem(draft.origins["algorithm", "numerics"], repr(name), str(error)))
        return
    _fill(draft, conventions, origin=f"numerics {name}")


def _fill(draft: Draft, values: Mapping[str, Any], *, origin: str) -> None:
    """Give settings that have no value yet those of a table of sections."""
    for table, fields in values.items():
        if not isinstance(fields, Mapping):
            wanted = "a table of settings and their values"
            draft.problems.append(Problem(f"{origin}: {table}", shown(fields), wanted))
            continue
        for key, value in fields.items():
            if table not in draft.schema.models or key not in draft.schema.models[table].model_fields:
                where = f"{origin}: {table}.{key}"
                draft.problems.append(Problem(where, "an unknown setting", "a known one"))
            elif key not in draft.values[table]:
                draft.put(table, key, value, origin=origin)
