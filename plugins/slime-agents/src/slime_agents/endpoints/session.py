"""`Session`: one agent at work: its tape, its key, its limits, and how it goes on when a client drops off."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import DataError

from slime_agents.endpoints.asking import Ask, Refused
from slime_agents.tape.messages import Message, n_same
from slime_agents.tape.tape import Tape, TapeAborted, TapeFull
from slime_agents.tape.turn import TapeTurn


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What one session may take."""

    max_turns: int = 8
    """Turns of the policy, of all branches."""
    max_requests_at_once: int = 8
    """Requests in flight."""
    max_refusals: int = 100
    """Refused requests, after which it is ended."""


@dataclass(kw_only=True, eq=False)
class _Asked:
    """A turn that no client has yet."""

    ask: Ask
    turn: asyncio.Task[TapeTurn]
    is_gone: Callable[[], bool]
    """Whether the client that waits for it has dropped off."""

    def is_lost(self, ask: Ask) -> bool:
        """Return whether it answers a request that is asked again, as the client that asked first is gone."""
        ours, theirs = self.ask.messages, ask.messages
        if not self.is_gone() or list(self.ask.tools or ()) != list(ask.tools or ()):
            return False
        return len(ours) == len(theirs) == n_same(ours, theirs)

    def answer(self) -> TapeTurn | None:
        """Return its turn; None while it is generated, and where that failed."""
        failed = not self.turn.done() or self.turn.cancelled() or self.turn.exception() is not None
        return None if failed else self.turn.result()


@dataclass(kw_only=True)
class Session:
    """One agent at work."""

    id: str
    """Which stands in its address, and in the ids of all that it is answered."""
    tape: Tape
    limits: SessionLimits
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """By which its requests are known: a secret of its own."""
    reward: float | None = None
    """What the program posted."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Refused requests, by why."""
    hit: str | None = None
    """The limit that it reached, if it did."""
    is_closed: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more can come of it, before its program has ended."""
    failure: BaseException | None = None
    """What the engine or the tape raised."""
    earlier: dict[str, Sequence[Message]] = field(default_factory=dict)
    """Histories by the ids of answers that they end with."""
    _asked: list[_Asked] = field(default_factory=list)
    _n_turns: int = 0
    """Turns that began, or are about to."""

    @property
    def is_aborted(self) -> bool:
        """Whether the rollout had all that it needed."""
        return isinstance(self.failure, TapeAborted)

    async def ask(self, ask: Ask, *, is_gone: Callable[[], bool]) -> TapeTurn:
        """Let the policy speak. A client that drops off gets the same turn when it asks again, be it done or not.

        Args:
            ask: the request.
            is_gone: whether its client has dropped off. While it has not, others that ask the same get turns of their own.

        Raises:
            Refused: a limit is reached, the request cannot be rendered, or the session is over.
        """
        if self.is_closed or self.failure is not None:
            raise Refused(401, "session_over", f"session {self.id} is over; it is answered no more")
        asked = next((one for one in self._asked if one.is_lost(ask)), None) or self._begin(ask, is_gone)
        asked.is_gone = is_gone
        try:
            return await asyncio.shield(asked.turn)
        except DataError as error:
            raise Refused(400, "invalid_request", str(error)) from error
        except TapeFull as error:
            self.hit = self.hit or "tokens"
            raise Refused(400, "context_length_exceeded", str(error)) from error
        except TapeAborted as error:
            self._end(error)
            raise Refused(503, "aborted", str(error)) from error
        except Exception as error:  # whatever it is, asking again does not help, and the run names it
            self._end(error)
            raise Refused(500, "engine", str(error)) from error

    def delivered(self, turn: TapeTurn, answer_id: str) -> None:
        """Say that a client has its answer."""
        self._asked = [one for one in self._asked if one.answer() is not turn]
        self.earlier[answer_id] = self.tape.history(turn)

    def refused(self, kind: str) -> None:
        """Count a refusal; a session that only ever gets refusals is ended."""
        self.refusals[kind] += 1
        if self.refusals.total() > self.limits.max_refusals:
            self.hit = self.hit or "refusals"
            self.is_over.set()

    async def end_with(self, rollout_is_over: asyncio.Event) -> None:
        """End it once the rollout has all that it needs, also where its program asks nothing more."""
        await rollout_is_over.wait()
        self._end(TapeAborted("the rollout has all that it needs"))

    async def close(self) -> None:
        """Answer nothing more, and end what is being generated."""
        self.is_closed = True
        turns = self._in_flight()
        for turn in turns:
            turn.cancel()
        for turn in turns:
            with contextlib.suppress(BaseException):
                await turn

    def record(self) -> dict[str, Any]:
        """Return what there is to say of it, for the metadata of its samples."""
        return {
            "session": self.id,
            "refused": dict(self.refusals),
            "forks": [fork.to_json() for fork in self.tape.forks],
        }

    def _begin(self, ask: Ask, is_gone: Callable[[], bool]) -> _Asked:
        """Have a turn generated, if the limits let it."""
        if len(self._in_flight()) >= self.limits.max_requests_at_once:
            most = self.limits.max_requests_at_once
            raise Refused(
                429,
                "too_many_at_once",
                f"session {self.id} has {most} requests in flight, the most there may be",
            )
        if self._n_turns >= self.limits.max_turns:
            self.hit = self.hit or "max_turns"
            raise Refused(429, "max_turns", f"session {self.id} has had its {self.limits.max_turns} turns")
        self._n_turns += 1
        turn = asyncio.create_task(self._turn(ask), name=f"turn {self.id}")
        asked = _Asked(ask=ask, turn=turn, is_gone=is_gone)
        self._asked.append(asked)
        turn.add_done_callback(lambda _: self._forget_failed())
        return asked

    async def _turn(self, ask: Ask) -> TapeTurn:
        """Let the policy speak; a request that begins no turn takes none of the session's."""
        try:
            return await self.tape.turn(ask.messages, ask.tools, max_tokens=ask.max_tokens, stop=ask.stop)
        except (DataError, TapeFull):
            self._n_turns -= 1
            raise

    def _forget_failed(self) -> None:
        self._asked = [one for one in self._asked if not one.turn.done() or one.answer() is not None]

    def _in_flight(self) -> list[asyncio.Task[TapeTurn]]:
        return [one.turn for one in self._asked if not one.turn.done()]

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.is_over.set()
