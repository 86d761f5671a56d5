"""The simulated engine: replicas that take time and compute nothing."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime_core.null.engine import NoEngine
from slime_core.protocols import Completion, EngineCapabilities, Fingerprint, SamplingParams, TransferPlan
from slime_core.rundir.events import EventLog

from slime_simulator.costs.costs import EngineCosts, Slowdown, UpdateCosts
from slime_simulator.costs.traces import Trace, index_of
from slime_simulator.parts.concurrency import OpenLimit
from slime_simulator.parts.cores import SharedCores
from slime_simulator.parts.replica import SimulatedReplica, SimulatedRequest

#: Of the mean number of requests: a replica with more of them gets no other one, as in slime_sglang.fleet.load_balancer.
_BOUND = 1.25


@dataclass(eq=False, slots=True)
class _Answers:
    """What the requests of a prompt were answered."""

    tokens: list[int]
    complete: asyncio.Future[None]
    n_missing: int = 0
    is_aborted: bool = False
    began: int | None = None
    """Weight updates that the engine had had when the first of them was admitted."""

    def take(self, request: SimulatedRequest, tokens: int, reason: str) -> None:
        """Take the answer of one of them."""
        self.tokens[request.place] = tokens
        self.is_aborted |= reason == "abort"
        if request.began is not None:
            self.began = request.began if self.began is None else min(self.began, request.began)
        self.n_missing -= 1
        if not self.n_missing and not self.complete.done():
            self.complete.set_result(None)


class ResponseLimit(OpenLimit):
    """The limit of a run whose engine keeps it: the engine knows of responses, the run of prompts alone."""

    def __init__(self, engine: SimulatedEngine, limit: int | None) -> None:
        super().__init__(limit, engine, EventLog())
        self._holding = engine

    @property
    def holds_back(self) -> bool:
        """Whether the engine holds responses back."""
        return self._holding.holds_back


class SimulatedEngine(NoEngine):
    """A `RolloutEngine` whose answers have the lengths of a trace. Each id stands for as many tokens as its value.

    One call generates all responses to a prompt, since loops and dispatcher decide on whole groups: a prompt of 300 tokens is
    the id 300, and three responses of 5000, 70 and 800 tokens are the ids 5000, 70, 800; what an abort left of them is
    continued by as many ids more. So the simulation takes the same time whatever the lengths. Each response is a request of
    its own, balanced as those of a fleet are: at random (there by a hash of the session) among the replicas that have less than
    1.25 times the mean number of requests. Where prompts are shared the first request of a prompt prefills it for the others.

    Args:
        costs: of one replica.
        update: of a weight update.
        replicas: how many there are.
        trace: lengths of the responses.
        samples: of a prompt.
        concurrency: most responses in flight, as `--rollout-concurrency` has it; None is any number.
        in_flight: what a weight update does to the requests in flight: `--update-weights-in-flight`.
        slowdown: by a trainer on the same cores, if there is one.
    """

    capabilities = EngineCapabilities(transports=("memory",))

    def __init__(
        self,
        costs: EngineCosts,
        update: UpdateCosts,
        *,
        replicas: int,
        trace: Trace,
        samples: int,
        concurrency: int | None = None,
        in_flight: Literal["recompute", "keep", "continue"] = "recompute",
        slowdown: Slowdown | None = None,
    ) -> None:
        self.replicas = [SimulatedReplica(costs) for _ in range(replicas)]
        self._update, self._trace, self._in_flight = update, trace, in_flight
        self._samples, self._limit, self._shares_prompts = samples, concurrency, costs.shares_prompts
        self._held: deque[SimulatedRequest] = deque()
        self.limit = ResponseLimit(self, concurrency)
        """Of the run whose engine this is."""
        self._versions: list[str] = ["0"]
        self._pending = 0
        self.cores = SharedCores(slowdown or Slowdown(), self.replicas)
        """Where a trainer on the same cores says that it is at work."""
        self._random = random.Random(0)

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer when the last of the prompt's responses is complete."""
        prompt, *parts = tokens
        n, first = self._samples, index_of(params) * self._samples
        answers = _Answers([0] * n, asyncio.get_running_loop().create_future())

        def answer(request: SimulatedRequest, tokens: int, reason: str) -> None:
            self._pending -= 1
            if not self._pending:
                self.cores.engine_works(False)
            answers.take(request, tokens, reason)
            self._send()

        is_prefilled = False
        for place in range(n):
            done = sum(parts[place::n])
            left = self._trace.response_tokens(first + place) - done
            if left > 0:
                answers.n_missing += 1
                prefill = prompt + done if done or not is_prefilled else 0
                self._held.append(SimulatedRequest(left, prompt + done, answer, prefill, place))
                is_prefilled |= self._shares_prompts and not done
        self._send()
        if answers.n_missing:
            await answers.complete
        began = answers.began
        version = self._versions[-1 if began is None else began]
        found = answers.tokens if any(answers.tokens) else []
        return Completion(
            tokens=found,
            log_probs=[0.0] * len(found),
            finish_reason="abort" if answers.is_aborted else "stop",
            weight_version=version,  # the oldest: ids that stand for many tokens cannot be divided into spans
        )

    @property
    def holds_back(self) -> bool:
        """Whether responses wait for the limit."""
        return bool(self._held)

    def _send(self) -> None:
        """Send what is held back, as far as the limit lets it through."""
        while self._held and (self._limit is None or self._pending < self._limit):
            if not self._pending:
                self.cores.engine_works(True)
            self._pending += 1
            self._pick().submit(self._held.popleft())
            if not self._held:
                self.limit.when_none_waits()

    def _pick(self) -> SimulatedReplica:
        """Return the replica of a request: any one of those below the bound, of which there is always one."""
        replicas = self.replicas
        if len(replicas) == 1:
            return replicas[0]
        share = math.ceil(_BOUND * self._pending / len(replicas))
        while True:
            replica = replicas[int(self._random.random() * len(replicas))]
            if replica.pending < share:
                return replica

    async def abort(self) -> None:
        """End every request in flight, and those that are held back."""
        held, self._held = self._held, deque()
        self._pending += len(held)
        for request in held:
            request.answer(request, 0, "abort")
        for replica in self.replicas:
            replica.abort()

    async def pause(self) -> None:
        """Stop all replicas."""
        for replica in self.replicas:
            replica.pause()

    async def resume(self) -> None:
        """Go on."""
        for replica in self.replicas:
            replica.resume(recompute=self._in_flight == "recompute")

    async def offload(self) -> None:
        """Take the time of leaving the devices."""
        await asyncio.sleep(self._update.switch_s)

    async def onload(self) -> None:
        """Take the time of coming back."""
        await asyncio.sleep(self._update.switch_s)

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Return a plan without a channel: no tensor is sent."""
        return TransferPlan(transport=transport, version=version, dtype="bfloat16")

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Pause for the time of an update."""
        await self.pause()
        await asyncio.sleep(self._update.pause_s)
        self._versions.append(plan.version)
        await self.resume()
        return {}
