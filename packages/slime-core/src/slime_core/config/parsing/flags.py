"""Reading flags: the words of the command line, `--set` among them."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from slime_core.config.parsing.draft import Draft
from slime_core.config.parsing.schema import Flag, Schema, closest, nearest
from slime_core.config.parsing.words import recipe_value, value_of
from slime_core.config.sections import ALIASES
from slime_core.config.stages import STAGE
from slime_core.errors import Problem
from slime_core.files.json_text import DASHES, shown


def merge_flags(draft: Draft, arguments: Sequence[str], *, stage: str, stages: Collection[str]) -> None:
    """Put the values of flags into the draft of a stage; `--set stage.NAME....` of another stage is passed over."""
    schema, problems = draft.schema, draft.problems
    draft.level += 1
    for word, given in _split_flags(arguments, draft):
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


def is_known(name: str, schema: Schema) -> bool:
    """Return whether there is a flag of this name (underscores), slime's own or one of a program that a plugin drives."""
    return _lookup(f"--{name}", schema)[0] is not None or schema.find_foreign(name) is not None


def _split_flags(arguments: Sequence[str], draft: Draft) -> Iterable[tuple[str, list[str]]]:
    """Group the words into (flag, its values); a flag behind another dash than two hyphens is one, and a problem."""
    problems = draft.problems
    grouped: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            word, equals, value = argument.partition("=")
            grouped.append((word, [value] if equals else []))
        elif flag := _dashed(argument, draft.schema):
            problems.append(Problem(argument, "a flag behind another dash", f"two hyphens: {flag}"))
            word, equals, value = flag.partition("=")
            grouped.append((word, [value] if equals else []))
        elif grouped:
            grouped[-1][1].append(argument)
        else:
            problems.append(Problem(argument, "a word that belongs to no flag", "a flag before it"))
    return grouped


def _dashed(word: str, schema: Schema) -> str | None:
    """Return the flag that a word would be with two hyphens, where it begins with some other dash."""
    name = word.lstrip(DASHES)
    if name == word or not is_known(name.partition("=")[0].replace("-", "_"), schema):
        return None
    return f"--{name}"


def _merge_set(draft: Draft, given: Sequence[str], *, stage: str, stages: Collection[str]) -> None:
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
