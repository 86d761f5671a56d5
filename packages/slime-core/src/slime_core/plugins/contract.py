"""Checks that a plugin's signature fits its group, before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from slime_core.files.json_text import shown
from slime_core.plugins.groups import Call, Group

_AWAITABLE = ("Awaitable", "Coroutine", "Future", "Task")


class Breach(NamedTuple):
    """Why a plugin cannot be called as its group is."""

    found: str
    wanted: str


def breach(about: Group, value: Any, *, flag: str | None = None) -> Breach | None:
    """Return what is wrong with a plugin; None where slime can call it.

    Args:
        about: the group that it was chosen from.
        value: the object itself.
        flag: by which it was chosen, where a group's flags call otherwise.
    """
    call = about.call_of.get(flag or "", about.call)
    if about.call_of and call is None:
        return None if callable(value) else Breach(_kind(value), "a function")
    if call is None:
        missing = [name for name in about.has if not hasattr(value, name)]
        wanted = f"{about.contract}, which has {', '.join(about.has)}"
        return Breach(_kind(value), wanted) if missing or inspect.isclass(value) else None
    if not callable(value):
        return Breach(_kind(value), f"a function, called as {call}")
    if inspect.isclass(value) and call.or_class:
        method = next((vars(base)["__call__"] for base in value.__mro__ if "__call__" in vars(base)), None)
        if method is None:
            return Breach("a class whose objects cannot be called", f"a method __call__, called as {call}")
        of_method = Call(("self", *call.by_position), call.by_name, is_async=None)
        return _misfit(method, of_method, shown=call) or _of_other_kind(method, of_method)
    return _misfit(value, call, shown=call) or _of_other_kind(value, call)


def _misfit(value: Callable[..., Any], call: Call, *, shown: Call) -> Breach | None:
    """Return why the arguments do not fit."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # what is written in C may not say; the call will tell
        return None
    options = {
        name: None
        for name, parameter in signature.parameters.items()
        if call.takes_options and parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    try:
        signature.bind(*call.by_position, **dict.fromkeys(call.by_name), **options)
    except TypeError as error:
        return Breach(f"the signature {signature} ({error})", f"one that can be called as {shown}")
    return None


def _of_other_kind(value: Callable[..., Any], call: Call) -> Breach | None:
    """Return that a function yields, or is async and should not be, or the reverse."""
    inner = inspect.unwrap(value)
    called = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__
    if inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        wanted = "one that returns its result" if not call.is_async else "an async function that returns it"
        return Breach("a function that yields", f"{wanted}: {call}")
    if call.is_async is None:
        return None
    is_async = any(map(inspect.iscoroutinefunction, (value, inner, called)))
    if call.is_async and not is_async and not _says_awaitable(called):
        return Breach("a function that is not async", f"`async def`, called as {call}")
    if not call.is_async and is_async:
        return Breach("an async function", f"a plain one, called as {call}: nobody awaits its result")
    return None


def _says_awaitable(value: Any) -> bool:
    """Return whether a plain function is annotated to return what can be awaited."""
    said = str(getattr(value, "__annotations__", {}).get("return", ""))
    return any(word in said for word in _AWAITABLE)


def _kind(value: Any) -> str:
    if inspect.ismodule(value):
        return f"the module {value.__name__}"
    return f"{shown(value)}, which is {type(value).__name__}"
