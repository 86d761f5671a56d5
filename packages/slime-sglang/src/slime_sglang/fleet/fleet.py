"""`EngineFleet`: the engine `sglang` over several servers: balances requests, updates all, and replaces those that fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

from slime_core.errors import DeadlineError, EngineError, ReceiverLostError
from slime_core.protocols import Completion, EngineLoad, Fingerprint, SamplingParams, Tokenizer, TransferPlan
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.receiver import UpdateReceiver

from slime_sglang.engine import SglangEngine
from slime_sglang.fleet.load_balancer import pick
from slime_sglang.fleet.loads import FleetLoads
from slime_sglang.fleet.pools import Pools
from slime_sglang.fleet.replica import Replica
from slime_sglang.fleet.router import Router
from slime_sglang.fleet.supervisor import EngineSupervisor, gather_all
from slime_sglang.fleet.updates import load, load_by_ranks, lose_engine, lose_those_with
from slime_sglang.generation.disaggregation import PrefillDecodePair
from slime_sglang.generation.images import data_urls
from slime_sglang.generation.response import PartialResponse
from slime_sglang.http.client import ServerFaultError
from slime_sglang.settings.section import FleetSection
from slime_sglang.weights.protocol import NONE_SENT

#: Engines that may fail at one request before it is given up: the request may be what makes them fail.
_ATTEMPTS = 3


class EngineFleet:
    """Generates by several SGLang servers. All methods must be called on the event loop that `start` ran on.

    With `use_fault_tolerance` an engine that exits or hangs is taken out at once. Its requests continue at others from the
    tokens that arrived, and a new engine takes its place, with the weights of the last update; where that was staged nowhere, it
    waits for the next one, and asks for it (`weights_wanted`). Without it the first failure is the caller's.

    Prefill and decode engines are two pools: a request gets one of each. While they are paused or load an update, they are
    drained: requests in flight are aborted, and continue from their tokens afterwards.

    Args:
        replicas: one for each engine.
        section: settings of the fleet.
        receiver: receives weight updates.
        tokenizer: of the model, for responses that continue at another engine.
        router: sends requests to the engines; None has them balanced here.
        others: engines of models that are not trained: they are started and stopped with these.
        waits_for_updates: whether the trainer's weights are off the devices while others generate.
        start_patience_s: how long a trainer that needs the devices waits for engines that are starting there.
    """

    capabilities = replace(SglangEngine.capabilities, asks_for_weights=True)

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        section: FleetSection,
        receiver: UpdateReceiver,
        tokenizer: Tokenizer,
        router: Router | None = None,
        others: Sequence[EngineSupervisor] = (),
        waits_for_updates: bool = False,
        start_patience_s: float,
    ) -> None:
        self._replicas, self._section, self._receiver = tuple(replicas), section, receiver
        self._tokenizer, self._router, self._waits_for_updates = tokenizer, router, waits_for_updates
        self._supervisor = EngineSupervisor(replicas, section=section, registry=router, join=self._join)
        self._others, self._start_patience_s = tuple(others), start_patience_s
        self._pools = Pools(self._replicas)
        self._is_disaggregated = len(self._pools.all) > 1
        self._room_numbers = itertools.count(1)
        self._n_drains = self._n_aborts = 0  # so far
        self._n_draining = 0  # of drains, not yet ended: while any is, requests wait
        # Held while an update or a pause reaches the engines: a new one joins before or after, not in between.
        self._moving = asyncio.Lock()
        self._is_paused = self._is_offloaded = False
        self.weight_version, self._loads = NONE_SENT, FleetLoads()

    async def start(self) -> None:
        """Start the router and all engines, and wait until they are ready.

        Raises:
            EngineError: one of them exited, or does not serve what this run needs.
            DeadlineError: one was not ready in time.
        """
        try:
            await gather_all([supervisor.start() for supervisor in (self._supervisor, *self._others)])
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
        """Generate one response to the prompt ids `tokens` with `images`; where an engine is lost, another one continues it.

        Raises:
            EngineError: refused, failed at by several engines, or no engine is left.
            DeadlineError: no answer within `request_timeout_s`.
            DataError: an image cannot be read.
        """
        if images and (self._router is not None or self._is_disaggregated):
            what = "through a router" if self._router is not None else "to prefill and decode engines"
            raise EngineError(f"images do not go {what}, which is not proven to work; do without it")
        n_aborts = self._n_aborts
        failed: list[Replica] = []
        response = PartialResponse(
            tokens,
            params,
            tokenizer=self._tokenizer,
            images=data_urls(images),
            newest=self.weight_version,
        )
        while True:
            chosen = await self._choose(session_id, avoid=failed, n_aborts=n_aborts)
            if chosen is None:
                break
            n_drains, engines = self._n_drains, [replica.engine for replica in chosen]
            try:
                await self._extend(response, engines, session_id)
            except EngineError as error:
                is_lost = any(engine.failure is not None for engine in engines)
                if not is_lost and self._were_drained(n_drains, n_aborts):
                    continue
                is_fault = is_lost or isinstance(error, ServerFaultError)
                if not (is_fault and self._section.use_fault_tolerance):
                    raise
                for suspect in chosen if self._router is None else self._replicas:
                    suspect.engine.suspected.set()
                if response.is_over:  # the engine was lost just after it had answered
                    break
                failed += chosen
                if len(failed) == _ATTEMPTS * len(chosen):
                    error.add_note(f"{_ATTEMPTS} engines in turn failed at this request")
                    raise
            else:
                if not self._were_drained(n_drains, n_aborts):
                    break
                response.reopen()
                if response.is_over:
                    break
        completion = response.completion(self.weight_version)
        if chosen is not None and self._router is None:  # which chooses by itself
            completion.metadata["replica"] = chosen[-1].name
        return completion

    async def current_load(self) -> EngineLoad:
        """Return how busy the servers that generate are together; prefill engines, whose KV cache passes on, do not count.

        Raises:
            EngineError: no server told it; without fault tolerance, one did not.
            DeadlineError: as above.
        """
        engines = [replica.engine for replica in self._pools.all[-1] if self._is_ready(replica)]
        waiting = 0 if self._router is None else self._router.waiting
        return await self._loads.read(engines, some=self._section.use_fault_tolerance, waiting=waiting)

    async def abort(self) -> None:
        """Abort every request in flight; each answers with its partial output and `abort`."""
        self._n_aborts += 1
        self._supervisor.notify()
        await self._on_all(lambda replica: replica.engine.abort())
        if self._router is not None:
            await self._router.abort(lambda: self._on_all(lambda replica: replica.engine.abort_requests()))

    async def pause(self) -> None:
        """Stop generating, and keep the requests in flight."""
        async with self._moving:
            self._is_paused = True
            if self._is_disaggregated:
                await self._begin_drain()
            else:
                await self._on_all(lambda replica: replica.engine.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._moving:
            self._is_paused = False
            if self._is_disaggregated:
                self._end_drain()
            else:
                await self._on_all(lambda replica: replica.engine.resume())

    async def offload(self) -> None:
        """Release the memory of weights and KV cache; `onload` takes it back. Until then no engine is started in the place of a lost one."""
        await self._supervisor.hold_starts(self._start_patience_s)
        async with self._moving:
            self._is_offloaded = True
            await self._on_all(lambda replica: replica.engine.offload(), waiting=True)

    async def onload(self) -> None:
        """Take the memory back. Weights that were released are undefined until the next update."""
        async with self._moving:
            self._is_offloaded = False
            await self._on_all(lambda replica: replica.engine.onload(), waiting=True)
        self._supervisor.allow_starts()

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`, once an engine of each pool is there to take it.

        Raises:
            EngineError: none is left; says what became of each.
        """
        while self._section.use_fault_tolerance and not self._pools.can_receive():
            self._pools.check_left()
            await self._supervisor.changed()
        return self._receiver.open(transport, version, has_ranks=True)

    async def weights_wanted(self, version: str) -> None:
        """Wait until an engine waits for weights that all others have, and the trainer on its devices; or no engine of a pool has any."""
        while not self._pools.lack(version, served=None if self._waits_for_updates else self.weight_version):
            await self._supervisor.changed()

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Receive the update once, and have every engine load it. An engine that is lost meanwhile gets it later.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or damaged; names
                it. No engine serves it.
            ReceiverLostError: an engine was lost while its ranks and others' received it, or all were; it is to be sent again.
            EngineError: an engine exited or failed; under fault tolerance, all of them.
        """
        with self._receiver.taking(plan):
            try:
                async with self._moving:
                    update = await self._receiver.arrive(plan)
                    async with self._drained():
                        if isinstance(update, RanksUpdate):
                            await self._receive_by_ranks(update)
                        else:
                            await self._on_all(lambda replica: load(replica, update))
                # Where all were lost, the first that is replaced loads it.
                while not self._pools.have(plan.version):
                    await self._choose(None, avoid=(), n_aborts=self._n_aborts)
            except ReceiverLostError:
                raise  # those that have the update keep it, and those with a mixture are held
            except BaseException:
                await lose_those_with(self._replicas, plan.version, served=self.weight_version)
                raise
        self.weight_version = plan.version
        return update.fingerprint

    async def close(self) -> None:
        """Stop the router and all engines, and free everything. May be called twice."""
        await gather_all([supervisor.close() for supervisor in (self._supervisor, *self._others)])
        self._receiver.close()

    async def _extend(
        self, response: PartialResponse, engines: Sequence[SglangEngine], session_id: str | None
    ) -> None:
        """Have the chosen engines, or whichever the router takes, generate the rest of a response."""
        stream = self._section.use_fault_tolerance  # otherwise nobody continues what arrived
        if self._router is not None:
            ready = [replica for replica in self._replicas if replica.is_ready]
            stream = stream and all(replica.engine.can_stream for replica in ready)
            await self._router.extend(response, stream=stream, session_id=session_id)
            return
        prefill_engine, decode_engine = engines[0], engines[-1]
        stream = stream and decode_engine.can_stream
        if not self._is_disaggregated:
            await decode_engine.extend(response, stream=stream)
            return
        # The prefill engine counts the request at once, for the balance, though it is sent only when the decode engine's is.
        with ExitStack() as expected:
            expected.enter_context(prefill_engine.gate.expecting())
            pair = PrefillDecodePair(
                prefill_engine,
                decode_engine,
                bootstrap_address=prefill_engine.bootstrap_address,
                room=next(self._room_numbers),
                on_prefill=expected.close,
            )
            await decode_engine.extend(response, stream=stream, pair=pair)

    async def _choose(
        self, session_id: str | None, *, avoid: Sequence[Replica], n_aborts: int
    ) -> list[Replica] | None:
        """Return the replicas that get a request, one of each pool, waiting for those that are checked or replaced.

        None where there was another abort after the first `n_aborts`.

        Raises:
            EngineError: none is left; says what became of each.
        """
        while n_aborts == self._n_aborts:
            ready = [[replica for replica in pool if self._is_ready(replica)] for pool in self._pools.all]
            if all(ready) and not self._n_draining:
                return [
                    pick([replica for replica in pool if replica not in avoid] or pool, session_id)
                    for pool in ready
                ]
            self._pools.check_left()
            await self._supervisor.changed()
        return None

    def _is_ready(self, replica: Replica) -> bool:
        """Whether a replica may get a request. Without fault tolerance each does, and a failure is the caller's."""
        if not self._section.use_fault_tolerance:
            return True
        engine = replica.engine
        return replica.is_ready and not engine.suspected.is_set() and not engine.is_held

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Have no engine hold a request within the context, where engines are disaggregated."""
        if not self._is_disaggregated:
            yield
            return
        try:
            await self._begin_drain()
            yield
        finally:
            self._end_drain()

    async def _begin_drain(self) -> None:
        """Abort the requests in flight, and hold them and all others back until `_end_drain` is called as often."""
        self._n_drains += 1
        self._n_draining += 1
        await self._on_all(lambda replica: replica.engine.abort())

    def _end_drain(self) -> None:
        self._n_draining -= 1
        self._supervisor.notify()

    def _were_drained(self, n_drains: int, n_aborts: int) -> bool:
        """Whether disaggregated engines were drained, or their requests aborted, since there were so many of both."""
        return self._is_disaggregated and (n_drains, n_aborts) != (self._n_drains, self._n_aborts)

    async def _on_all[T](self, call: Callable[[Replica], Awaitable[T]], *, waiting: bool = False) -> list[T]:
        """Make a call to all engines at once, and to those that wait for weights if `waiting`, and return their answers.

        The first failure ends it; under fault tolerance the engine that fails is lost, and the others go on.
        """
        if not self._section.use_fault_tolerance:
            return await gather_all([call(replica) for replica in self._replicas])
        asked = [(one, one.engine) for one in self._replicas if one.is_ready or (waiting and one.is_waiting)]
        answers = await asyncio.gather(*(call(replica) for replica, _ in asked), return_exceptions=True)
        good: list[T] = []
        for (replica, engine), answer in zip(asked, answers, strict=True):
            if isinstance(answer, EngineError | DeadlineError):
                await lose_engine(replica, engine, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append(answer)
        return good

    async def _receive_by_ranks(self, update: RanksUpdate) -> None:
        """Have all engines that lack an update join it, and have those serve that waited for it.

        Raises:
            WeightSyncError: one refused it, or holds something else.
            ReceiverLostError: some were lost, and others lack it.
        """
        await load_by_ranks(self._replicas, update, self._section)
        if not self._pools.have(update.version):
            raise ReceiverLostError(
                f"update to version {update.version}: every engine was lost that received it"
            )
        self.weight_version = update.version
        for replica in self._replicas:
            if replica.is_waiting and replica.engine.weight_version == update.version:
                await self._enter(replica)

    async def _join(self, replica: Replica) -> None:
        """Bring an engine that has just started to the others' weights and state, and have it serve.

        Raises:
            EngineError: the weights that the others hold are not staged any more.
            WeightSyncError: it refused them, or holds something else then.
        """
        async with self._moving:
            if self._receiver.kept is not None:
                await load(replica, self._receiver.kept)
            elif self.weight_version != NONE_SENT and self._receiver.keeps_nothing:
                self._supervisor.keep_waiting(replica)
                return
            elif self.weight_version != NONE_SENT:
                raise EngineError(
                    f"{replica.name}: the last update failed, and no weights are staged to give it"
                )
            await self._enter(replica)

    async def _enter(self, replica: Replica) -> None:
        """Bring an engine that has the others' weights to their state, and have it serve."""
        if self._is_paused and not self._is_disaggregated:
            await replica.engine.pause()
        if self._is_offloaded:
            await replica.engine.offload()
        await self._supervisor.admit(replica)
