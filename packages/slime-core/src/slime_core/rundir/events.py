"""`events.jsonl`: what a run did and when, one JSON object a line, written by a thread. docs/events.md has the schema.

Lines are kept in memory as they are told, and handed to the thread once a second and at the end of a step. A span is told
when it is over: a run that is killed leaves none half-open, and loses what was told in its last second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic_core
from annotated_types import Ge, Le
from pydantic import AllowInfNan, BaseModel, ConfigDict

from slime_core.errors import ConfigError, Problem
from slime_core.files.strict_read import Counted, Unreadable, checked, json_object, open_regular
from slime_core.runtime.clock import now
from slime_core.runtime.daemon_thread import DaemonThread

logger = logging.getLogger(__name__)

#: Of the schema; a reader refuses any other.
VERSION = 1
#: The name of the first line that a process writes.
HEADER = "header"
#: Lanes: the loop, generation of a step, decisions of the dispatcher, an engine that names no replica, and rewards.
LOOP, ROLLOUT, DISPATCHER, ENGINE, REWARDS = "loop", "rollout", "dispatcher", "engine", "rewards"
#: How lanes of the trainer's ranks begin; the number follows.
RANK = "rank "
#: Seconds after which events are handed to the thread, and how many may wait for that.
_HAND_OVER_S, _MOST_HELD = 1.0, 20_000

_Seconds = Annotated[float, AllowInfNan(False), Ge(0), Le(10**12)]


class _Line(BaseModel):
    """What must be in a line; all else depends on its name."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    lane: str


class _Span(_Line):
    begin: _Seconds
    seconds: _Seconds


class _Moment(_Line):
    at: _Seconds


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: Literal["header"]
    version: int
    wall_clock: _Seconds
    pid: Counted
    step: Counted


class EventLog:
    """Takes down the spans and moments of a run. One that has no file takes nothing down.

    Belongs to one thread, that of the event loop. Where the file cannot be written, a warning says so once, and nothing more
    is taken down: a run does not end for that.

    Args:
        path: the file; None for none.
        clock: seconds, of which spans are told.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = now) -> None:
        self._now = clock
        self._path = path
        self._zero, self._wall_clock = clock(), time.time()
        self._held: list[bytes] = []  # lines: bytes give the garbage collector nothing to look through
        self._due = self._zero
        self._thread: DaemonThread | None = None
        self._writing: deque[Future[None]] = deque()

    @property
    def is_on(self) -> bool:
        """Whether anything is taken down."""
        return self._path is not None

    def start(self, step: int) -> None:
        """Begin to write, behind what earlier processes of the run wrote; what was told before comes after the header.

        Args:
            step: the first that this process is to run.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path is None:
            return
        with self._path.open("ab+") as file:
            file.truncate(_end_of_lines(file))
        header = {"name": HEADER, "version": VERSION, "wall_clock": self._wall_clock}
        self._held.insert(0, _line(header | {"pid": os.getpid(), "step": step}))
        self._thread = DaemonThread("events")
        self._hand_over(self._now())

    def span(self, name: str, *, lane: str, begin: float, seconds: float, **more: Any) -> None:
        """Tell what is over: it began at `begin` on the clock, and took so many seconds."""
        if self._path is None:
            return
        end = begin + seconds
        # Begin and end are rounded alike, so that what is within a span stays so.
        begun_us, ended_us = int((begin - self._zero) * 1e6 + 0.5), int((end - self._zero) * 1e6 + 0.5)
        begun_us = begun_us if begun_us > 0 else 0
        lasted = (ended_us - begun_us) / 1e6 if ended_us > begun_us else 0.0
        self._held.append(
            _line({"name": name, "lane": lane, "begin": begun_us / 1e6, "seconds": lasted, **more})
        )
        if end > self._due or len(self._held) >= _MOST_HELD:
            self._hand_over(end)

    @contextlib.contextmanager
    def timed(self, name: str, *, lane: str, **more: Any) -> Iterator[None]:
        """Tell a block as a span when it is over, also where it raises."""
        begin = self._now()
        try:
            yield
        finally:
            self.span(name, lane=lane, begin=begin, seconds=self._now() - begin, **more)

    def moment(self, name: str, *, lane: str, **more: Any) -> None:
        """Tell what happens now."""
        if self._path is not None:
            at = round(self._now() - self._zero, 6)
            self._held.append(_line({"name": name, "lane": lane, "at": at, **more}))

    def hand_over(self) -> None:
        """Have what was told so far written, without waiting for it."""
        self._hand_over(self._now())
        while self._writing and self._writing[0].done():
            self._written(self._writing.popleft())

    def flush(self) -> None:
        """Wait until all that was told is written."""
        self._hand_over(self._now())
        while self._writing:
            self._written(self._writing.popleft())

    def close(self) -> None:
        """Flush, and end the thread. May be called twice."""
        try:
            self.flush()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)
                self._thread = None

    def _written(self, writing: Future[None]) -> None:
        try:
            writing.result()
        except OSError as error:
            if self._path is not None:
                logger.warning("%s: %s; this process takes down no more events", self._path, error)
            self._path, self._held = None, []

    def _hand_over(self, now: float) -> None:
        self._due = now + _HAND_OVER_S
        if self._thread is not None and self._path is not None and self._held:
            held, self._held = self._held, []
            self._writing.append(self._thread.submit(_append, self._path, held))


def _line(event: dict[str, Any]) -> bytes:
    try:
        return pydantic_core.to_json(event, inf_nan_mode="null", fallback=str) + b"\n"
    except ValueError:  # half of a character in the reason of a filter, say
        text = json.dumps(event, ensure_ascii=False, default=str).encode(errors="replace")
        return pydantic_core.to_json(json.loads(text), inf_nan_mode="null") + b"\n"


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab", buffering=0) as file:
        end, left = file.tell(), memoryview(b"".join(lines))
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)  # what comes later must not follow on half a line
            raise


def _end_of_lines(file: Any) -> int:
    """Return the length of a file without a last line that a crash has cut."""
    end: int = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + int(found) + 1
        end = begin
    return 0


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an `events.jsonl` as they were written, the header of each process among them.

    What a crash has cut off behind the last line feed is left out.

    Raises:
        ConfigError: there is no such file, it cannot be read, or a line is not what a run writes; names the line.
    """
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _event(line, is_first=number == 1)
                except Unreadable as error:
                    todo = "delete or mend that line, or read the file with the slime that wrote it"
                    found = f"in line {number} {error}"
                    raise ConfigError(
                        [Problem(str(path), found, "an event of docs/events.md", todo)]
                    ) from None
    except FileNotFoundError:
        todo = "slime train writes it, unless events are switched off (--no-events)"
        raise ConfigError([Problem(str(path), "no such file", "the events of a run", todo)]) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError([Problem(str(path), why, "a file that can be read")]) from error


def _event(line: bytes, *, is_first: bool) -> dict[str, Any]:
    event = json_object(line)
    if event.get("name") == HEADER:
        checked(_Header, event)
        if event["version"] != VERSION:
            raise Unreadable(f"version {event['version']}; this slime reads version {VERSION}")
    elif is_first:
        raise Unreadable("no header, which comes first")
    else:
        is_moment = "at" in event and "begin" not in event and "seconds" not in event
        checked(_Moment if is_moment else _Span, event)
    return event
