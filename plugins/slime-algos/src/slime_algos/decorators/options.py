"""Joining the options of a function with those that a decorator adds to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def joined_signature(
    function: Callable[..., Any], wrapper: Callable[..., Any], *, given: str
) -> inspect.Signature:
    """Return the wrapper's positional parameters, then the keyword-only ones of both.

    Core fills options by name from a plugin function's signature (`slime_core.plugins.bind`).

    Args:
        function: what is wrapped.
        wrapper: what takes its place; its `**options` stand for the function's.
        given: parameter of the function that the wrapper computes.

    Raises:
        TypeError: the function lacks `given`, or both take an option of the same name.
    """
    inner = inspect.signature(function).parameters
    outer = inspect.signature(wrapper, follow_wrapped=False).parameters
    if given not in inner:
        raise TypeError(f"{function.__qualname__}: takes no parameter {given!r}; wanted (view, {given}, ...)")
    own = [p for p in inner.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    twice = sorted({p.name for p in own} & set(outer))
    if twice:
        raise TypeError(
            f"{function.__qualname__}: takes {', '.join(twice)} itself, which every such function has"
        )
    positional = [p for p in outer.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    added = [p for p in outer.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return inspect.Signature([*positional, *own, *added])


def options_of_section(wrapper: Callable[..., Any]) -> dict[str, str]:
    """Return the wrapper's options, each with the distribution whose section holds its value: the attribute `options_from`.

    A function of somebody's own thus heeds `--entropy-coef` as those of slime-algos do (`slime_core.config.functions`).
    """
    parameters = inspect.signature(wrapper, follow_wrapped=False).parameters.values()
    return {p.name: "slime-algos" for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
