"""Running an event loop in a bounded time: tasks that are left when its work is done are not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from slime_core.errors import Interrupted, RunError
from slime_core.runtime.deadline import CANCEL_S, close_tasks
from slime_core.runtime.processes.command_process import COMMAND, adopt_orphans
from slime_core.runtime.stop import Listener, Stop
from slime_core.runtime.watchdog import WATCHDOG, Watchdog

logger = logging.getLogger(__name__)

#: Seconds that what is left of the event loop has to end.
_END_S = 15.0


def run_event_loop[T](work: Callable[[Stop], Awaitable[T]]) -> T:
    """Run `work` on a new event loop and return its result. `asyncio.run` would wait for every remaining task.

    Signals of a `slime` command ask the `Stop` that the work is given. `SystemExit` and `KeyboardInterrupt` of any task, which
    would end the loop in the midst, ask it too.

    Raises:
        Interrupted: a signal asked for the end.
        RunError: a task asked for it, or something stopped the loop.
    """
    command = COMMAND.get()
    loop = asyncio.new_event_loop()
    watchdog = Watchdog(command, loop)
    context = contextvars.copy_context()
    context.run(WATCHDOG.set, watchdog)
    with contextlib.ExitStack() as stack:
        stack.callback(watchdog.stop)
        asyncio.set_event_loop(loop)
        stack.callback(asyncio.set_event_loop, None)
        stack.callback(_end, loop, watchdog)
        stop = Stop()
        if command is not None:
            adopt_orphans()
            listener = Listener(loop, stop, watchdog)
            stack.enter_context(
                command.tells(listener.hear, lambda number: watchdog.last_words(Interrupted(number)))
            )
        return _driven(loop, loop.create_task(_awaited(work(stop)), name="run", context=context), stop)


def _driven[T](loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], stop: Stop) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            cause: Interrupted | RunError = Interrupted(signal.SIGINT)
            ended = task.done()
        except SystemExit as error:
            cause, ended = (
                RunError(f"something in the run called sys.exit({error.code!r}); raise an error instead"),
                task.done(),
            )
        except asyncio.CancelledError as error:
            raise stop.cause or RunError(
                "something in the run was cancelled together with the run's own task"
            ) from error
        except RuntimeError as error:
            if task.done():
                raise
            cause, ended = RunError(f"something in the run stopped its event loop: {error}"), False
        if ended:
            raise cause
        stop.ask(cause)


def _end(loop: asyncio.AbstractEventLoop, watchdog: Watchdog) -> None:
    """Cancel the remaining tasks and close the loop, within `_END_S` seconds."""
    with watchdog.watching("the end of the event loop", _END_S):
        for step in (_end_tasks, _end_generators, _end_threads):
            with contextlib.suppress(BaseException):  # tasks that are left behind may raise anything
                loop.run_until_complete(step(loop))
        with contextlib.suppress(RuntimeError):
            loop.close()


async def _end_tasks(loop: Any) -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    if left:
        _, pending = await asyncio.wait(left, timeout=CANCEL_S)
        await close_tasks(list(pending))


async def _end_generators(loop: Any) -> None:
    await asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_S)


async def _end_threads(loop: Any) -> None:
    await loop.shutdown_default_executor(timeout=CANCEL_S)


async def _awaited[T](work: Awaitable[T]) -> T:
    return await work
