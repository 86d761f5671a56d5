"""Engine `sglang` over several servers: spreads requests, updates all of them, and does without those that fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Completion, Fingerprint, SamplingParams, Tokenizer, TransferPlan
from slime_core.weights import check_fingerprints

from slime_sglang.apart import Pairing
from slime_sglang.client import ServerFaultError
from slime_sglang.draft import NONE_SENT, Draft
from slime_sglang.engine import SglangEngine
from slime_sglang.keeper import Keeper, all_of
from slime_sglang.pictures import encoded
from slime_sglang.router import Router
from slime_sglang.seat import Seat
from slime_sglang.section import TRANSPORTS, FleetSection
from slime_sglang.spread import pick
from slime_sglang.stager import Stager
from slime_sglang.staging import Update

#: Engines that may fail at one request before it is given up: it may be the request that they fail at.
_ATTEMPTS = 3
#: What an engine is there for.
_WORK = {"regular": "generate", "prefill": "read prompts", "decode": "generate"}


class EngineFleet:
    """Generates by several SGLang servers. All methods must be called on the event loop that `start` ran on.

    With `use_fault_tolerance` an engine that ends or hangs is taken out at once. Its requests go on elsewhere from the
    tokens that arrived, and a new engine takes its place, with the weights of the last update. Without it the first
    failure is the caller's.

    Engines that only read prompts and engines that only generate are two teams: a request gets one of each. While they
    are paused or load an update none has a request. Those under way are ended, and go on from their tokens afterwards.

    Args:
        seats: one for each engine.
        section: settings of the fleet.
        stager: takes weight updates in.
        tokenizer: of the model, for responses that go on elsewhere.
        router: sends requests to the engines; None has them spread here.
        others: engines of other models, which stay as they are: they are started and stopped with these.
        keeps: whether requests go on that an update ends, where engines are in two teams.
    """

    transports: tuple[str, ...] = TRANSPORTS
    sees_images = True

    def __init__(
        self,
        seats: Sequence[Seat],
        *,
        section: FleetSection,
        stager: Stager,
        tokenizer: Tokenizer,
        router: Router | None = None,
        others: Sequence[Keeper] = (),
        keeps: bool = True,
    ) -> None:
        self._seats, self._section, self._stager = tuple(seats), section, stager
        self._tokenizer, self._router = tokenizer, router
        self._keeper = Keeper(seats, section=section, register=router, join=self._join)
        self._others = tuple(others)
        roles = [seat.engine.role for seat in self._seats]
        self._teams = [
            [seat for seat, own in zip(self._seats, roles, strict=True) if own == role]
            for role in ("regular", "prefill", "decode")
            if role in roles
        ]
        self._is_apart = len(self._teams) > 1
        self._rooms = itertools.count(1)
        self._keeps, self._holds, self._held = keeps, 0, 0
        self._aborts = 0
        # Held while an update or another move reaches the engines: a new one joins before or after, not in between.
        self._moving = asyncio.Lock()
        self._is_paused = self._is_offloaded = False
        self.weight_version = NONE_SENT

    async def start(self) -> None:
        """Start the router and all engines, and wait until they are ready.

        Raises:
            EngineError: one of them ended, or is not one that can be used.
            DeadlineError: one was not ready in time.
        """
        try:
            await all_of([keeper.start() for keeper in (self._keeper, *self._others)])
        except (EngineError, DeadlineError):
            await self.close()
            raise

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`, and the images in it; where an engine is lost over it, another one goes on.

        Raises:
            EngineError: refused, failed at by several engines, or no engine is left.
            DeadlineError: no answer within `request_timeout_s`.
            DataError: an image cannot be read.
        """
        if images and (self._router is not None or self._is_apart):
            what = "through a router" if self._router is not None else "to prefill and decode engines"
            raise EngineError(f"images do not go {what}, which is not proven to work; do without it")
        aborts = self._aborts
        failed: list[Seat] = []
        draft = Draft(
            tokens,
            params,
            tokenizer=self._tokenizer,
            images=encoded(images),
            newest=self.weight_version,
        )
        while True:
            crew = await self._crew_for(session_id, avoid=failed, aborts=aborts)
            if crew is None:
                break
            holds, engines = self._holds, [seat.engine for seat in crew]
            try:
                await self._extend(draft, engines, session_id)
            except EngineError as error:
                is_lost = any(engine.failure is not None for engine in engines)
                if not is_lost and self._were_emptied(holds, aborts):
                    continue
                if not (
                    (is_lost or isinstance(error, ServerFaultError)) and self._section.use_fault_tolerance
                ):
                    raise
                for suspect in crew if self._router is None else self._seats:
                    suspect.engine.suspected.set()
                if draft.is_over:  # its engine was lost just after
                    break
                failed += crew
                if len(failed) == _ATTEMPTS * len(crew):
                    error.add_note(f"{_ATTEMPTS} engines in turn failed at this request")
                    raise
            else:
                if not self._were_emptied(holds, aborts):
                    break
                draft.reopen()
                if draft.is_over:
                    break
        return draft.completion(self.weight_version)

    async def abort(self) -> None:
        """End every request under way; each answers with its partial output and `abort`."""
        self._aborts += 1
        self._keeper.tell()
        await self._everywhere(lambda seat: seat.engine.abort())
        if self._router is not None:
            await self._router.abort(lambda: self._everywhere(lambda seat: seat.engine.abort_requests()))

    async def pause(self) -> None:
        """Stop generating and keep the requests under way."""
        async with self._moving:
            self._is_paused = True
            if self._is_apart:
                await self._empty()
            else:
                await self._everywhere(lambda seat: seat.engine.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._moving:
            self._is_paused = False
            if self._is_apart:
                self._fill()
            else:
                await self._everywhere(lambda seat: seat.engine.resume())

    async def offload(self) -> None:
        """Release weights and cache; `onload` brings their memory back."""
        async with self._moving:
            self._is_offloaded = True
            await self._everywhere(lambda seat: seat.engine.offload())

    async def onload(self) -> None:
        """Take the memory back. Where weights were released, the next update brings them."""
        async with self._moving:
            self._is_offloaded = False
            await self._everywhere(lambda seat: seat.engine.onload())

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""
        return self._stager.open(transport, version)

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take the update in once, and have every engine load it. An engine that is lost over it gets it later.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or was damaged
                on its way; names it. No engine serves it.
            EngineError: an engine ended or broke off; under fault tolerance, all of them.
        """
        with self._stager.taking(plan):
            try:
                async with self._moving:
                    update = await self._stager.arrive(plan)
                    async with self._emptied():
                        await self._everywhere(lambda seat: self._load(seat, update))
                while not self._has(plan.version):
                    await self._crew_for(None, avoid=(), aborts=self._aborts)  # the first to be back has it
            except BaseException:
                await self._end_those_with(plan.version)
                raise
        self.weight_version = plan.version
        return update.fingerprint

    async def close(self) -> None:
        """Stop the router and all engines, and free everything. May be called twice."""
        await all_of([keeper.close() for keeper in (self._keeper, *self._others)])
        self._stager.close()

    async def _extend(self, draft: Draft, engines: Sequence[SglangEngine], session_id: str | None) -> None:
        """Have the engines of a request, or whichever the router takes, generate the rest of a response."""
        stream = self._section.use_fault_tolerance  # only then anybody goes on with what arrived
        if self._router is not None:
            stream = stream and all(seat.engine.can_stream for seat in self._seats if seat.is_ready)
            await self._router.extend(draft, stream=stream, session_id=session_id)
            return
        reader, writer = engines[0], engines[-1]
        stream = stream and writer.can_stream
        if not self._is_apart:
            await writer.extend(draft, stream=stream)
            return
        with ExitStack() as place:  # the next request is to know of this one before it is the writer's turn
            place.enter_context(reader.gate.expecting())
            room = next(self._rooms)
            pairing = Pairing(reader, writer, port=reader.bootstrap_port, room=room, arrives=place.close)
            await writer.extend(draft, stream=stream, pairing=pairing)

    async def _crew_for(
        self, session_id: str | None, *, avoid: Sequence[Seat], aborts: int
    ) -> list[Seat] | None:
        """Return the seats that get a request, one of each team, waiting for those that are checked or replaced.

        None where there was an abort since `aborts` of them.

        Raises:
            EngineError: none is left; says what became of each.
        """
        while aborts == self._aborts:
            ready = [[seat for seat in team if self._is_ready(seat)] for team in self._teams]
            if all(ready) and not self._held:
                return [
                    pick([seat for seat in team if seat not in avoid] or team, session_id) for team in ready
                ]
            for team in self._teams:
                if all(seat.state == "gone" for seat in team):
                    reasons = "\n".join(f"{seat.name}: {seat.reason}" for seat in team)
                    raise EngineError(f"no engine is left to {_WORK[team[0].engine.role]}:\n{reasons}")
            await self._keeper.changed()
        return None

    def _is_ready(self, seat: Seat) -> bool:
        """Whether a seat may get a request. Without fault tolerance each does, and a failure is the caller's."""
        if not self._section.use_fault_tolerance:
            return True
        return seat.is_ready and not seat.engine.suspected.is_set()

    def _has(self, version: str) -> bool:
        """Whether an engine of each team holds a version."""
        return all(any(seat.engine.weight_version == version for seat in team) for team in self._teams)

    @asynccontextmanager
    async def _emptied(self) -> AsyncIterator[None]:
        """Have no engine hold a request within the context, where they are in two teams."""
        if not self._is_apart:
            yield
            return
        if not self._keeps:
            self._aborts += 1
        try:
            await self._empty()
            yield
        finally:
            self._fill()

    async def _empty(self) -> None:
        """End the requests under way, and hold them and all others back until `_fill` is called as often."""
        self._holds += 1
        self._held += 1
        await self._everywhere(lambda seat: seat.engine.abort())

    def _fill(self) -> None:
        self._held -= 1
        self._keeper.tell()

    def _were_emptied(self, holds: int, aborts: int) -> bool:
        """Whether requests were ended, where engines are in two teams, since so many times."""
        return self._is_apart and (holds, aborts) != (self._holds, self._aborts)

    async def _everywhere[T](self, move: Callable[[Seat], Awaitable[T]]) -> list[T]:
        """Make a move at all engines at once, and return what they answer.

        The first failure ends it; under fault tolerance the engine that fails is lost, and the others go on.
        """
        if not self._section.use_fault_tolerance:
            return await all_of([move(seat) for seat in self._seats])
        asked = [(seat, seat.engine) for seat in self._seats if seat.is_ready]
        answers = await asyncio.gather(*(move(seat) for seat, _ in asked), return_exceptions=True)
        good: list[T] = []
        for (seat, engine), answer in zip(asked, answers, strict=True):
            if isinstance(answer, EngineError | DeadlineError):
                if seat.state == "serving" and seat.engine is engine:  # its guard has not been faster
                    seat.lose(str(answer))
                    await engine.kill()  # which its guard sees
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append(answer)
        return good

    async def _load(self, seat: Seat, update: Update) -> None:
        """Have one engine load an update, and compare what it then holds with what was sent.

        Raises:
            WeightSyncError: it refused it, or holds something else.
        """
        try:
            held = await seat.engine.load(update)
            check_fingerprints(update.fingerprint, held, version=update.version)
        except WeightSyncError as error:
            error.add_note(f"found by {seat.name}")
            raise

    async def _end_those_with(self, version: str) -> None:
        """End the engines that have loaded an update which failed: all engines serve one version."""
        if version == self.weight_version:
            return
        ahead = [seat.engine for seat in self._seats if seat.engine.weight_version == version]
        why = f"it had loaded the update to version {version}, which failed"
        await asyncio.gather(*(engine.lose(why) for engine in ahead))

    async def _join(self, seat: Seat) -> None:
        """Bring an engine that has just started to where the others are, and have it serve.

        Raises:
            EngineError: the weights that the others hold are not at hand.
            WeightSyncError: it refused them, or holds something else then.
        """
        async with self._moving:
            if self._stager.kept is not None:
                await self._load(seat, self._stager.kept)
            elif self.weight_version != NONE_SENT:
                raise EngineError(
                    f"{seat.name}: the last update broke off, and there are no weights to give it"
                )
            if self._is_paused and not self._is_apart:
                await seat.engine.pause()
            if self._is_offloaded:
                await seat.engine.offload()
            await self._keeper.seat_in(seat)
