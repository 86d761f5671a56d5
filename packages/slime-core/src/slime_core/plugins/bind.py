"""Filling a plugin function's options from settings.

A plugin function declares its options as keyword-only parameters. Core fills them by name: first from the
slot's `*_args` table, then from the section that the function's own distribution registers.

One with many options takes them as one object: a keyword-only parameter `settings`, annotated with a `SectionModel` of its
module, whose fields are then options, too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.files.json_text import shown


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of `function`: its keyword-only parameters, and the fields of its settings object in place of it."""
    own, model = _keywords(function), settings_model(function)
    if model is None:
        return own
    return _keywords(model) | {name: option for name, option in own.items() if name != "settings"}


def settings_model(function: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the model that `function` takes options as; None where it takes them one by one."""
    parameter = _keywords(function).get("settings")
    if parameter is None:
        return None
    kind = parameter.annotation
    if isinstance(kind, str):
        kind = getattr(sys.modules.get(inspect.unwrap(function).__module__), kind, None)
    return kind if inspect.isclass(kind) and issubclass(kind, BaseModel) else None


def arguments(
    function: Callable[..., Any], options: Mapping[str, Any], *, where: str = "options"
) -> dict[str, Any]:
    """Return the keyword arguments that give `function` its options.

    Raises:
        ConfigError: a value does not fit the field of the settings object; `where` and the field's name say which.
    """
    model = settings_model(function)
    if model is None:
        return dict(options)
    own = {name: value for name, value in options.items() if name not in model.model_fields}
    fields = {name: value for name, value in options.items() if name in model.model_fields}
    try:
        return own | {"settings": model.model_validate(fields, strict=True)}
    except ValidationError as error:
        raise ConfigError(
            Problem(
                ".".join([where, *map(str, detail["loc"])]),
                shown(detail["input"]),
                detail["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
            )
            for detail in error.errors(include_url=False, include_context=False)
        ) from error


def choose_options(
    function: Callable[..., Any],
    *,
    where: str,
    explicit: Mapping[str, Any],
    section: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the values of `function`'s options.

    Args:
        function: plugin function.
        where: setting that holds `explicit`, for messages: `reward.rm_args`.
        explicit: the slot's table; every key must be an option.
        section: values of the section of the function's distribution; used where names agree.

    Raises:
        PluginError: an unknown key in `explicit`, or an option without a value.
        ConfigError: a value that a settings object refuses.
    """
    options = options_of(function)
    for key in explicit:
        if key not in options:
            near = difflib.get_close_matches(key, options, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PluginError(
                f"{where}: found the key {key!r}; {hint}{_name(function)} takes {', '.join(options) or 'no options'}"
            )
    values = {name: value for name, value in (section or {}).items() if name in options} | dict(explicit)
    for name, parameter in options.items():
        if name not in values and parameter.default is inspect.Parameter.empty:
            raise PluginError(f"{where}: {_name(function)} needs the option {name!r}; set it in {where}")
    arguments(function, values, where=where)
    return values


def bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with its options filled in, its attributes kept."""
    if not options and settings_model(function) is None:
        return function
    bound = functools.partial(function, **arguments(function, options))
    functools.update_wrapper(bound, function)
    return bound


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none of one that is written in C and does not say."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = parameters_of(function)
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
