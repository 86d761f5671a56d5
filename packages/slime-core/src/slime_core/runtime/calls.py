"""Calls to other processes that are open: when one passes its deadline, the stacks of both its ends are written to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from slime_core.runtime.processes.stacks import own_lines
from slime_core.runtime.watchdog import stacks

logger = logging.getLogger(__name__)

#: Seconds that the other ends get to say where they are, all together; most of them that are asked.
_TOLD_S, _MOST = 3.0, 8


@dataclass(frozen=True)
class Callee:
    """The other end of a call."""

    name: str
    """How messages call it."""
    stacks: Callable[[], Awaitable[str]] = field(compare=False)
    """Has it write its stacks, and returns them; empty where it says nothing."""
    without: tuple[str, ...] = ()
    """Parts of paths of files in them that do not count as its own, such as `/ray/`."""


@dataclass(frozen=True)
class _Call:
    what: str
    callee: Callee


_OPEN: ContextVar[_Call | None] = ContextVar("slime_call", default=None)


@contextlib.contextmanager
def calling(what: str, callee: Callee) -> Iterator[None]:
    """Say that this task waits for another process within the block, and for what."""
    token = _OPEN.set(_Call(what, callee))
    try:
        yield
    finally:
        _OPEN.reset(token)


def open_calls(tasks: Iterable[asyncio.Task[object]]) -> list[tuple[str, Callee]]:
    """Return for what the tasks wait that are in a block of `calling`, and for whom, each pair once, by name."""
    found = dict.fromkeys(
        call for task in tasks if not task.done() and (call := task.get_context().get(_OPEN)) is not None
    )
    return sorted(
        ((call.what, call.callee) for call in found),
        key=lambda pair: (pair[0], len(pair[1].name), pair[1].name),  # rank 2 before rank 10
    )


async def tell_both_ends(missed: str, calls: Iterable[tuple[str, Callee]]) -> list[str]:
    """Write the stacks of this process and of those that were called to the log.

    Args:
        missed: the deadline, for the log.
        calls: what was asked for, and of whom; of many the first few are asked.

    Returns:
        For each `what` a note that says who did not answer, and at which of its own lines each of its threads is.
    """
    by_what: dict[str, list[Callee]] = {}
    for what, callee in [*calls][:_MOST]:
        by_what.setdefault(what, []).append(callee)
    callees = [*dict.fromkeys(callee for each in by_what.values() for callee in each)]
    if not callees:
        return []
    here = stacks(asyncio.get_running_loop())
    told = dict(zip(callees, await asyncio.gather(*map(_asked, callees)), strict=True))
    ends = "\n".join(f"{each.name} was at\n{told[each] or '(it says nothing)'}" for each in callees)
    logger.error("%s; this process was at\n%s\n%s", missed, here, ends, extra={"file_alone": True})
    return [
        f"no answer to {what} from {'; '.join(_place(one, told[one]) for one in each)}; stacks of both ends are in the log"
        for what, each in by_what.items()
    ]


async def _asked(callee: Callee) -> str:
    with contextlib.suppress(
        Exception
    ):  # it may be gone, and whoever asks it too: that is no other error than the one at hand
        async with asyncio.timeout(_TOLD_S):
            return await callee.stacks()
    return ""


def _place(callee: Callee, told: str) -> str:
    lines = own_lines(told, callee.without)
    return f"{callee.name}, " + (f"at {' and '.join(lines)}" if lines else "which does not say where it is")
