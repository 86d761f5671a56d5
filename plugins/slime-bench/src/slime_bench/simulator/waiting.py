"""Runs whose engine and trainer wait on the real clock, and compute nothing: what is compared is the schedule alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from slime_core.config.derive import batch_sizes
from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, Fingerprint, Metrics, SamplingParams, TransferPlan
from slime_core.run.tracking import attach
from slime_core.rundir.rundir import RunDir
from slime_core.samples import Group, Sample, TrainBatch
from slime_core.samples.compact import FLOAT32, IDS, Compact
from slime_core.testing.tabular import TabularEngine, TabularTrainer
from slime_core.trackers.jsonl import JsonlTracker
from slime_simulator.costs.costs import Costs, EngineCosts, TrainerCosts, UpdateCosts
from slime_simulator.costs.traces import Lognormal, index_of
from slime_simulator.parts.prompts import SimulatedPrompts
from slime_simulator.simulation import make_run

#: What the parts take; the fit is not told.
REAL = Costs(
    engine=EngineCosts(step_s=1.6e-2, request_s=6e-4, kv_token_s=1e-5, prefill_token_s=2e-4, slots=16),
    trainer=TrainerCosts(token_gpu_s=5e-4, fixed_s=0.1),
    update=UpdateCosts(send_s=0.03, pause_s=0.03),
)
TRACE = Lognormal(median=10, p99=50, longest=60, prompt=8)
_SAMPLES = 2
_PARTIAL = ("--partial-rollout", "--rollout-in-completion-order", "--over-sampling-batch-size")

#: Name -> (prompts of a step, flags). The first is what the costs are fitted from.
CONFIGURATIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sync, 16 prompts": (16, ()),
    "sync, 8": (8, ()),
    "sync, 32": (32, ()),
    "sync, 8, partial of 16": (8, (*_PARTIAL, "16")),
    "sync, 16, partial of 24": (16, (*_PARTIAL, "24")),
    "one-step-off, 8": (8, ("--loop", "one-step-off")),
    "one-step-off, 16": (16, ("--loop", "one-step-off")),
    "one-step-off, 32": (32, ("--loop", "one-step-off")),
    "fully-async, 8, 1 step old": (8, ("--loop", "fully-async", "--max-staleness", "1")),
    "fully-async, 16, 1 step old": (16, ("--loop", "fully-async", "--max-staleness", "1")),
    "fully-async, 16, 2, as completed": (
        16,
        ("--loop", "fully-async", "--max-staleness", "2", "--rollout-in-completion-order"),
    ),
    "fully-async, 8, 4": (8, ("--loop", "fully-async", "--max-staleness", "4")),
    "fully-async, 32, 1, continued": (
        32,
        ("--loop", "fully-async", "--max-staleness", "1", "--update-weights-in-flight", "continue"),
    ),
}


@dataclass(eq=False)
class _Response:
    left: int
    context: int
    answer: asyncio.Future[str]
    done: int = field(default=0, init=False)
    version: str = field(default="", init=False)
    """Weights when it was admitted."""


class DecodingEngine(TabularEngine):
    """Decodes all running requests together, one real wait after the other for each decode step."""

    def __init__(self, costs: EngineCosts, update: UpdateCosts) -> None:
        super().__init__()
        self._costs, self._update = costs, update
        self._ids = Compact(IDS, np.zeros(TRACE.longest, dtype=np.int32))
        self._log_probs = Compact(FLOAT32, np.full(TRACE.longest, -1.0, dtype=np.float32))
        self._waiting: deque[_Response] = deque()
        self._running: list[_Response] = []
        self._decoding: asyncio.Task[None] | None = None
        self._may_decode = asyncio.Event()
        self._may_decode.set()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer when the response is decoded."""
        index = index_of(params)
        left = TRACE.response_tokens(index) - (len(tokens) - TRACE.prompt_tokens(index))
        response = _Response(max(1, left), len(tokens), asyncio.get_running_loop().create_future())
        self._waiting.append(response)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        reason = await response.answer
        n = response.done
        return Completion(
            tokens=self._ids[:n],
            log_probs=self._log_probs[:n],
            finish_reason=reason,
            weight_version=response.version,
        )

    async def _decode(self) -> None:
        """Take decode steps while there are requests. Each begins when the one before was due: being woken late adds nothing up."""
        costs, loop = self._costs, asyncio.get_running_loop()
        due = loop.time()
        while self._waiting or self._running:
            while self._waiting and len(self._running) < costs.slots:
                self._running.append(self._waiting.popleft())
                self._running[-1].version = self.version
                due += self._running[-1].context * costs.prefill_token_s
            kv = sum(each.context + each.done for each in self._running)
            due += costs.step_s + len(self._running) * costs.request_s + kv * costs.kv_token_s
            await asyncio.sleep(due - loop.time())
            if not self._may_decode.is_set():
                began = loop.time()
                await self._may_decode.wait()
                due += loop.time() - began
            for each in self._running:
                each.done += 1
                if each.done == each.left and not each.answer.done():
                    each.answer.set_result("stop")
            self._running = [each for each in self._running if each.done < each.left]

    async def abort(self) -> None:
        """End all requests at their present tokens."""
        ended, self._running = [*self._running, *self._waiting], []
        self._waiting.clear()
        for each in ended:
            if not each.answer.done():
                each.answer.set_result("abort")

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take the table, and the time of an update, in which nothing is decoded."""
        self._may_decode.clear()
        await asyncio.sleep(self._update.pause_s)
        found = await super().receive(plan)
        self._may_decode.set()
        return found


class ComputingTrainer(TabularTrainer):
    """Takes the time of the batch's tokens."""

    def __init__(self, costs: TrainerCosts, update: UpdateCosts) -> None:
        super().__init__(estimator=None, loss=None, lr=0.0)
        self._costs, self._update = costs, update

    async def train(self, batch: TrainBatch) -> Metrics:
        """Wait."""
        await asyncio.sleep(self._costs.step_s(len(batch.tokens), gpus=1))
        return {}

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send the table, and wait."""
        await asyncio.sleep(self._update.send_s)
        return await super().send(plan)


class _TokenPrompts(SimulatedPrompts):
    """Prompts that have as many ids as they are long, and as many samples as there are to be."""

    def take(self, n_groups: int) -> list[Group]:
        """Return the next prompts."""
        groups = [group[0].index or 0 for group in super().take(n_groups)]
        return [
            [
                Sample(index=i, group_index=group, tokens=[0] * TRACE.prompt_tokens(i))
                for i in range(group * _SAMPLES, (group + 1) * _SAMPLES)
            ]
            for group in groups
        ]


def settings_of(name: str, registry: Registry, *, steps: int) -> Settings:
    """Return the settings of a configuration."""
    prompts, flags = CONFIGURATIONS[name]
    words = [
        "--hf-checkpoint", "none", "--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(_SAMPLES),
        "--num-rollout", str(steps), "--rollout-max-response-len", "100000", "--no-save-last", *flags,
    ]  # fmt: skip
    if "--update-weights-in-flight" not in flags:
        words += ["--update-weights-in-flight", "keep"]  # the real engine recomputes nothing
    return load_settings([], words, registry=registry)


def run_really(settings: Settings, folder: Path) -> None:
    """Drive a run on the real clock, and leave its folder."""
    registry = Registry.from_environment()

    async def work() -> None:
        run = make_run(
            settings,
            registry,
            engine=DecodingEngine(REAL.engine, REAL.update),
            trainer=ComputingTrainer(REAL.trainer, REAL.update),
            source=_TokenPrompts(TRACE, samples=_SAMPLES),
            sizes=batch_sizes(settings),
        )
        run.run_dir = RunDir(folder)
        run.run_dir.create()
        run.run_dir.write_text(run.run_dir.config.name, settings.to_toml())
        run.trackers = [JsonlTracker(run.run_dir)]
        attach(registry, run.trackers)
        try:
            await registry.resolve("slime.loops", settings.run.loop)(run)
            run.run_dir.flush()
        finally:
            await run.close()

    asyncio.run(work())
