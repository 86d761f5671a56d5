"""Engines that only read prompts (`prefill`) and engines that only generate (`decode`): one request of two of them.

Both get the request. The first computes the prompt's cache and the first token, and hands them to the second, which
answers. SGLang moves the cache by mooncake, or by what `--sglang-disaggregation-transfer-backend` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import DeadlineError, EngineError, Problem

if TYPE_CHECKING:
    from slime_sglang.server import Device

#: How SGLang moves the cache where nothing else is said. Without a GPU by TCP: mooncake's own choice is RDMA.
_BACKENDS = {"cuda": "mooncake", "cpu": "mooncake_tcp"}
#: Where engines of a run meet: they are on one host.
HOST = "127.0.0.1"
#: Seconds that one half gets to answer when the other one has; and when it was told to end.
_LAST_WORD_S, _GRACE_S = 1.0, 10.0
_POLL_S = 0.25
#: What of the system the wheels of mooncake load.
_LIBRARY = "libibverbs.so.1"
#: The wheel is one of two, and this says which.
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda on a machine without a GPU, mooncake-transfer-engine on one with "
    "CUDA; or leave the engines whole"
)


class Half(Protocol):
    """One of the two engines, as a request sees it."""

    async def read(self, body: Mapping[str, Any]) -> Any:
        """Read a prompt and hand its cache over; None where an abort came before it was its turn."""

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call the server for something other than generation."""


@dataclass(frozen=True)
class Pairing:
    """The two engines of one request, and how its halves find each other."""

    reader: Half
    writer: Half
    port: int
    """Where the writer finds the reader."""
    room: int
    """Of this request alone, from 1 on."""
    arrives: Callable[[], object] = lambda: None
    """Called when the reader gets it."""

    @property
    def request_id(self) -> str:
        """What the request is called at both; none begins as another one does."""
        return f"{self.room:032x}"

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request to both, made of one to a single engine."""
        meeting = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.port,
            "bootstrap_room": self.room,
            "rid": self.request_id,
        }
        return {**body, **meeting}

    async def together(self, body: Mapping[str, Any], writing: Awaitable[None]) -> None:
        """Await both halves of a request, and end the other where one fails; what counts is the writer's answer.

        SGLang itself waits for minutes until it counts a half as lost, and holds memory for the other meanwhile.

        Raises:
            EngineError: one of them failed at it.
            DeadlineError: one took too long.
        """
        read = asyncio.ensure_future(self._read(body))
        written = asyncio.ensure_future(writing)
        try:
            await asyncio.wait({read, written}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done() and read.exception() is None and read.result() is not None:
                await asyncio.wait({written})
            if not written.done():  # the prompt's cache will not come
                await self._end(self.writer, written)
            await asyncio.wait({read}, timeout=_LAST_WORD_S)
            if not read.done():
                await self._end(self.reader, read)
            if not written.done() or written.exception() is not None:
                await read  # of which the writer's failure follows
            await written
        finally:
            for half in (read, written):
                half.cancel()
            await asyncio.gather(read, written, return_exceptions=True)

    async def _read(self, body: Mapping[str, Any]) -> Any:
        self.arrives()
        return await self.reader.read({**body, "stream": False})

    async def _end(self, half: Half, work: asyncio.Future[Any]) -> None:
        """End the request at one half, and wait until it has answered; one that does not is given up."""
        with contextlib.suppress(TimeoutError, EngineError, DeadlineError):  # so will the request fail
            async with asyncio.timeout(_GRACE_S):
                while not work.done():  # it may have reached the server after the last call
                    await half.control("/abort_request", {"rid": self.request_id})
                    await asyncio.wait({work}, timeout=_POLL_S)


def half_arguments(
    role: str, given: Mapping[str, Any], *, bootstrap_port: int, device: Device
) -> dict[str, Any]:
    """Return SGLang's arguments of an engine that does half of the work; `given` are the user's, which win.

    Args:
        role: `prefill` or `decode`.
        given: arguments of the run and of the group.
        bootstrap_port: where decode engines find a prefill engine.
        device: what the server runs on.
    """
    own: dict[str, Any] = {"disaggregation_transfer_backend": _BACKENDS[device]}
    if device == "cpu":  # not the pool of memory that SGLang wants 10 GiB to spare for
        own["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    derived = {"disaggregation_mode": role}
    if role == "prefill":
        derived["disaggregation_bootstrap_port"] = bootstrap_port
    return {**own, **given, **derived}


def half_environment(*, request_timeout_s: float, device: Device) -> dict[str, str]:
    """Return the variables to add to the environment of such an engine's server, but for those that are set.

    SGLang gives a request up when its other half has not come for 300 s, which is no long wait in a queue: the deadline
    of requests decides. Without a GPU two ways of sending are not taken that wait for CUDA events (SGLang 0.5.23,
    disaggregation/prefill.py): each prompt is sent when all of it is read, by every context-parallel rank, which is one.
    """
    seconds = str(math.ceil(request_timeout_s))
    wanted = {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": seconds,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": seconds,
        "SGLANG_HOST_IP": HOST,
    }
    if device == "cpu":
        wanted["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
        wanted["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def transfer_problems(arguments: Mapping[str, Any], *, where: str) -> Iterator[Problem]:
    """Yield what is missing on this machine for mooncake, unless the arguments name another transfer."""
    if arguments.get("disaggregation_transfer_backend") not in (None, *_BACKENDS.values()):
        return
    missing = missing_for_mooncake()
    if missing is not None:
        what, hint = missing
        yield Problem(where, f"prefill and decode engines, and no {what}", "it", hint)


def missing_for_mooncake() -> tuple[str, str] | None:
    """Return what mooncake misses on this machine, and how to get it; None where nothing is."""
    if importlib.util.find_spec("mooncake") is None:
        return "package mooncake", _INSTALL
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return (
            f"{_LIBRARY}, which mooncake loads",
            "apt-get install libibverbs1, or the package that has it on this system",
        )
    return None
