"""Filling a plugin function's options from settings.

A plugin function declares its options as keyword-only parameters. Core fills them by name: first from the
slot's `*_args` table, then from the section that the function's own distribution registers.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import PluginError


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of `function`."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


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
    return values


def bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with its options filled in, its attributes kept."""
    if not options:
        return function
    bound = functools.partial(function, **options)
    functools.update_wrapper(bound, function)
    return bound


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
