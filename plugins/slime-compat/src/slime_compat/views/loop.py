"""Calling coroutines from plain functions: on the run's event loop, from the thread in which a rollout function is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from slime_core.errors import PluginError

from slime_compat.views.runtime import running


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


def on_loop[T](function: Callable[[], T]) -> T:
    """Call a function on the event loop of the run, from its own thread or another."""
    runtime = running()
    if runtime is None or _on_loop(runtime.loop):
        return function()

    async def call() -> T:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), runtime.loop).result()


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
