"""Validating a draft: sections of settings, and a problem for each value that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slime_core.config.base import SectionModel
from slime_core.config.parsing.draft import Draft
from slime_core.config.parsing.words import annotation_of, takes_bool, unfit_text, wanted
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.files.json_text import shown


def validated(draft: Draft) -> Settings:
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
    """Return a section in which some settings have no value; only checks see it."""
    fit = {key: _parsed(model, key, value) for key, value in values.items() if key not in unset}
    section = model.model_construct(**fit)
    for key in unset:
        vars(section).pop(key, None)
    return section


def _parsed(model: type[SectionModel], field: str, value: Any) -> Any:
    """Return a value as its section would have it: a text that stands for a list is one."""
    if (info := model.model_fields.get(field)) is None:
        return value
    try:
        return TypeAdapter(annotation_of(info)).validate_python(value, strict=True)
    except ValidationError:
        return value


def _unfit(draft: Draft, table: str, field: str, value: Any) -> Problem | None:
    """Return what is wrong with a value that its type does not tell."""
    annotation = draft.schema.flag_of(table, field).annotation
    if isinstance(value, bool) and not takes_bool(annotation):
        return Problem(_where(draft, table, field), str(value).lower(), wanted(annotation))
    if why := unfit_text(value):
        return Problem(_where(draft, table, field), f"{shown(value)}, with {why}", "text without it")
    return None


def _problem(draft: Draft, table: str, field: str, detail: Mapping[str, Any]) -> Problem:
    """Say what is wrong with a value in our words; a field's own check says what it wants."""
    flag = draft.schema.flag_of(table, field)
    where = _where(draft, table, field, *detail["loc"][1:])
    if detail["type"] == "missing":
        todo = f"give {flag.spelled} or set it in [{table}] of the recipe"
        return Problem(where, "nothing", "a value", todo)
    own = detail["type"] == "value_error"
    said = (
        str(detail["msg"]).removeprefix("Value error, ") if own else wanted(flag.annotation, detail["input"])
    )
    return Problem(where, shown(detail["input"]), said)


def _where(draft: Draft, table: str, field: str, *inside: Any) -> str:
    origin = draft.origins.get((table, field))
    path = ".".join([table, field, *map(str, inside)])
    if origin is None or origin.startswith("--"):
        return origin or path
    return f"{origin}: {path}"
