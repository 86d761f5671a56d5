"""The run's event loop, from plain functions, from threads, and from other event loops."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from slime_core.errors import PluginError

from slime_compat.views.running.runtime import current, running, using


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; `slime.utils.async_utils.run`.

    In a rollout or evaluation function it runs on the event loop of the run, else on one of its own.

    Raises:
        PluginError: it is called on the event loop, which would wait for itself.
    """
    runtime = running()
    if runtime is None:
        return asyncio.run(coroutine)
    if _on_loop(runtime.loop):
        coroutine.close()
        raise PluginError("run(coroutine) is called inside an async function; await the coroutine there")
    return asyncio.run_coroutine_threadsafe(coroutine, runtime.loop).result()


def on_loop[T](function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Call a function on the event loop of a run, from its own thread or another."""
    if _on_loop(loop):
        return function()

    async def call() -> T:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), loop).result()


def in_run[**P, T](view: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let an async view, whose first argument is `args`, be awaited on any event loop; it runs on that of the run."""

    @functools.wraps(view)
    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        runtime = current(view.__name__, args[0] if args else kwargs.get("args"))
        with using(runtime):
            return await awaited(view(*args, **kwargs), runtime.loop)

    return called


async def awaited[T](coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Await a coroutine that belongs on the event loop of a run, on that one or from another."""
    if _on_loop(loop):
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
