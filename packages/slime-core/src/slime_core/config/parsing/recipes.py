"""Reading recipes: TOML files, their tables and their stages' tables."""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime_core.config.parsing.draft import Draft
from slime_core.config.parsing.schema import closest, nearest
from slime_core.config.parsing.words import recipe_value
from slime_core.config.sections import ALIASES
from slime_core.config.stages import STAGE
from slime_core.errors import Problem
from slime_core.files.json_text import MAX_DEPTH, is_deep, shown
from slime_core.files.strict_read import open_regular
from slime_core.plugins.index import home_of_section
from slime_core.plugins.registry import Registry

_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
#: Where a shell's `<(command)` and a pipe into `slime` are: their writer is there, and ends.
_PIPES = re.compile(r"/dev/fd/[0-9]+|/proc/self/fd/[0-9]+|/dev/stdin")
#: Most characters of a recipe.
_MOST = 16 << 20


def read_recipe(recipe: str, problems: list[Problem]) -> dict[str, Any]:
    """Return the tables of a recipe; none, and a problem, where it cannot be read."""
    why, wanted = "", "a TOML file"
    try:
        text = _text(recipe)
        tables = tomllib.loads(text) if len(text) <= _MOST else None
        if tables is not None and not is_deep(tables):
            return tables
        why = f"tables or lists nested deeper than {MAX_DEPTH}" if tables else f"more than {_MOST} characters"
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


def _text(recipe: str) -> str:
    """Return the text of a recipe, and no more of it than shows that it is too long."""
    path = Path(recipe)
    with (
        path.open("rb") if _PIPES.fullmatch(str(path)) else open_regular(path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig") as text,
    ):
        return text.read(_MOST + 1)


def stage_tables(
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


def merge_tables(draft: Draft, tables: Mapping[str, Any], registry: Registry, *, origin: str) -> None:
    """Put the values of a recipe's tables into the draft."""
    draft.level += 1
    for name, table in tables.items():
        if name not in draft.schema.models or not isinstance(table, dict):
            broken = "".join(
                f"; {dist} failed to import: {why}" for dist, why in registry.broken_hooks.items()
            )
            where = f"{origin}: [{name}]" if isinstance(table, dict) else f"{origin}: {name}"
            wanted = nearest(name, draft.schema.models) + broken
            if not isinstance(table, dict):
                draft.problems.append(_no_table(draft, name, table, where=where))
                continue
            if home := home_of_section(name):
                wanted = f"{home}, which brings it" + (broken or "; install it")
            draft.problems.append(Problem(where, "an unknown section", wanted))
            if meant := closest(name, draft.schema.models):
                draft.unset |= {(meant, key) for key in table}
            continue
        for key, value in table.items():
            _merge_key(draft, name, key, value, origin=origin)


def _no_table(draft: Draft, name: str, value: Any, *, where: str) -> Problem:
    """Return what is wrong with what stands at the top of a recipe and is no table, and see to the setting that is meant."""
    if name in draft.schema.models:
        found = f"a list of tables, [[{name}]]" if isinstance(value, list) else shown(value)
        return Problem(where, found, f"a table: [{name}]")
    field = ALIASES.get(name, name)
    home = next((table for table, model in draft.schema.models.items() if field in model.model_fields), None)
    if home is None:
        return Problem(where, "a setting outside of a section", nearest(name, draft.schema.flags))
    draft.unset.add((home, field))
    return Problem(where, "a setting outside of a section", f"it in [{home}]")


def _merge_key(draft: Draft, table: str, key: str, value: Any, *, origin: str) -> None:
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
