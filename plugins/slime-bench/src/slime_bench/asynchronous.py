"""`slime bench async`: the loops beside each other over responses with a long tail, and beside the ideal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, Metrics, SamplingParams
from slime_core.run.assemble import assemble
from slime_core.run.run import Run
from slime_core.run.start import start
from slime_core.run.tracking import attach
from slime_core.samples import Sample, TrainBatch
from slime_core.samples.compact import FLOAT32, IDS, Compact
from slime_core.testing.tabular import TabularEngine, TabularTrainer
from slime_simulator.costs.traces import Lognormal, index_of

_HERE = "slime_bench.asynchronous:"
_TABULAR = "slime_core.testing.tabular:"
#: Tokens of the longest response.
_LONGEST = 60_000
#: Tokens of the median response.
_MEDIAN = 1000
#: Lengths of the responses, as those of reasoning are.
_TRACE = Lognormal(median=_MEDIAN, p99=20 * _MEDIAN, longest=_LONGEST)


@dataclass(frozen=True, kw_only=True)
class LoopWorkload:
    """What each loop has to do."""

    steps: int
    prompts: int
    samples: int
    slots: int
    """Requests that the engine generates at once; others wait."""
    median_s: float
    """Seconds of the median response."""
    staleness: int

    @property
    def train_s(self) -> float:
        """Seconds of a training step: four fifths of the mean time that the engine needs for a step's tokens."""
        return 0.8 * self.prompts * self.samples * math.exp(_TRACE.sigma**2 / 2) * self.median_s / self.slots


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one loop took."""

    loop: str
    wall_s: float
    samples_per_s: float
    of_ideal: float
    """Least time for the samples that it trained on, over its own."""
    staleness: float
    """Mean, in steps."""


#: The work of the run that is measured; engine and trainer are built from settings and look here.
_work: LoopWorkload | None = None


class WaitingEngine(TabularEngine):
    """Takes for each response as long as it has tokens, some at once; an abort ends it at the tokens so far."""

    def __init__(self, work: LoopWorkload) -> None:
        super().__init__()
        self._slots, self._token_s = asyncio.Semaphore(work.slots), work.median_s / _MEDIAN
        self._ids = Compact(IDS, np.zeros(_LONGEST, dtype=np.int32))
        self._log_probs = Compact(FLOAT32, np.full(_LONGEST, -1.0, dtype=np.float32))
        self._aborted = asyncio.Event()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer after the time of what is left of the response."""
        aborted = self._aborted
        n = _TRACE.response_tokens(index_of(params)) - (len(tokens) - 1)
        async with self._slots:
            version, begin, reason = self.version, time.perf_counter(), "stop"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(n * self._token_s):
                    await aborted.wait()
                n, reason = min(n, int((time.perf_counter() - begin) / self._token_s)), "abort"
        return Completion(
            tokens=self._ids[:n], log_probs=self._log_probs[:n], finish_reason=reason, weight_version=version
        )

    async def abort(self) -> None:
        """End all requests, also those that wait for a slot."""
        self._aborted.set()
        self._aborted = asyncio.Event()


class WaitingTrainer(TabularTrainer):
    """Takes the time of a training step, and learns nothing."""

    def __init__(self, work: LoopWorkload) -> None:
        super().__init__(estimator=None, loss=None, lr=0.0)
        self._seconds = work.train_s

    async def train(self, batch: TrainBatch) -> Metrics:
        """Wait."""
        await asyncio.sleep(self._seconds)
        return {}


def _given() -> LoopWorkload:
    assert _work is not None, "only `slime bench async` builds these parts"
    return _work


def _engine(build: BuildContext) -> WaitingEngine:
    return WaitingEngine(_given())


def _trainer(build: BuildContext) -> WaitingTrainer:
    return WaitingTrainer(_given())


#: Builds the engine.
create_engine = EngineFactory(_engine, WaitingEngine.capabilities)
#: Builds the trainer.
create_trainer = TrainerFactory(_trainer, WaitingTrainer.capabilities)

#: Name -> flags.
LOOPS: dict[str, list[str]] = {
    "sync": ["--loop", "sync"],
    "sync, partial rollouts": ["--loop", "sync", "--partial-rollout"],
    "one-step-off": ["--loop", "one-step-off"],
    "fully-async": ["--loop", "fully-async", "--rollout-in-completion-order"],
}


def measure(work: LoopWorkload, loop: str) -> Taken:
    """Drive a run of waiting parts by a loop, and return what it took from its first step to its last."""
    global _work
    _work = work
    flags = list(LOOPS[loop])
    if "partial" in loop:
        flags += ["--over-sampling-batch-size", str(2 * work.prompts), "--rollout-in-completion-order"]
    if loop == "fully-async":
        flags += ["--max-staleness", str(work.staleness), "--rollout-concurrency", str(work.slots)]
    return asyncio.run(_measured(work, loop, flags))


class _Trained:
    """What a run trained on."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.ages: list[int] = []

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        self.lengths += [sample.response_length for sample in samples]
        self.ages += [step - 1 - int(sample.weight_versions[0]) for sample in samples]


async def _measured(work: LoopWorkload, loop: str, flags: Sequence[str]) -> Taken:
    registry, trained = Registry.from_environment(), _Trained()
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name, contextlib.redirect_stdout(None):
        folder = Path(name)
        (folder / "prompts.jsonl").write_text(
            (json.dumps({"input": "a", "label": "b"}) + "\n") * work.prompts
        )
        given = {
            "hf-checkpoint": folder, "tokenizer": f"{_TABULAR}load_tokenizer", "prompt-data": folder / "prompts.jsonl",
            "label-key": "label", "output-dir": folder, "run-name": "async", "tracker": "jsonl", "save-interval": "none",
            "no-save-last": None, "num-rollout": work.steps, "rollout-engine": f"{_HERE}create_engine",
            "train-backend": f"{_HERE}create_trainer", "rollout-batch-size": work.prompts,
            "n-samples-per-prompt": work.samples, "rollout-max-response-len": _LONGEST, "custom-rm-path": f"{_TABULAR}next_letter",
            "advantage-estimator": f"{_TABULAR}credit", "loss-type": f"{_TABULAR}reinforce",
            "loss-reducer": f"{_TABULAR}per_token",
        }  # fmt: skip
        words = [
            word
            for flag, value in given.items()
            for word in ([f"--{flag}"] if value is None else [f"--{flag}", str(value)])
        ]
        run = await assemble(load_settings([], [*words, *flags], registry=registry), registry)
        make_batch = run.make_batch

        def noted(step: int, groups: Sequence[list[Sample]]) -> TrainBatch:
            trained.add(step, [sample for group in groups for sample in group])
            return make_batch(step, groups)

        run.make_batch = noted
        wall_s = await _timed(run)
    least_s = _least_s(work, trained.lengths)
    n = len(trained.lengths)
    return Taken(
        loop=loop,
        wall_s=wall_s,
        samples_per_s=n / wall_s,
        of_ideal=least_s / wall_s,
        staleness=sum(trained.ages) / n,
    )


async def _timed(run: Run) -> float:
    try:
        await start(run)
        attach(run.registry, run.trackers)
        loop = run.registry.resolve("slime.loops", run.settings.run.loop)
        begin = time.perf_counter()
        await loop(run)
        return time.perf_counter() - begin
    finally:
        await run.close()


def _least_s(work: LoopWorkload, lengths: Sequence[int]) -> float:
    """Return the least time: of the engine with all slots busy, or of the trainer after the first batch, whatever is more."""
    token_s = work.median_s / _MEDIAN
    first = sorted(lengths)[: work.prompts * work.samples]
    engine_s = max(sum(lengths) / work.slots, max(lengths)) * token_s + work.train_s
    trainer_s = work.steps * work.train_s + max(sum(first) / work.slots, first[-1]) * token_s
    return max(engine_s, trainer_s)


def asynchronous(argv: list[str]) -> int:
    """Drive runs by each loop, over an engine and a trainer that take time and compute nothing.

    Lengths are lognormal with a 99th percentile of 20 times the median. The ideal is the least time in which an engine with
    that many slots and the trainer could have done the same samples.
    """
    arguments = _parse(argv)
    work = LoopWorkload(
        steps=arguments.steps,
        prompts=arguments.prompts,
        samples=arguments.samples,
        slots=arguments.slots,
        median_s=arguments.median_ms / 1000,
        staleness=arguments.max_staleness,
    )
    taken = [measure(work, loop) for loop in LOOPS]
    if arguments.json:
        print(json.dumps({"work": asdict(work), "loops": [asdict(each) for each in taken]}))
        return 0
    table = Table("loop", "seconds", "samples/s", "x sync", "of the ideal", "staleness", box=None)
    for each in taken:
        table.add_row(
            each.loop,
            f"{each.wall_s:.1f}",
            f"{each.samples_per_s:.1f}",
            f"{taken[0].wall_s / each.wall_s:.2f}",
            f"{each.of_ideal:.2f}",
            f"{each.staleness:.2f}",
        )
    console = Console()
    console.print(
        f"{work.steps} steps of {work.prompts} prompts x {work.samples} samples, {work.slots} at once; the median response "
        f"{arguments.median_ms:g} ms, a training step {work.train_s * 1000:.0f} ms; fully-async: at most {work.staleness} steps "
        f"old, in order of completion, {work.slots} requests in flight"
    )
    console.print(table)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench async", description=asynchronous.__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--slots", type=int, default=32, help="requests that the engine generates at once")
    parser.add_argument("--median-ms", type=float, default=40.0, help="time of the median response")
    parser.add_argument("--max-staleness", type=int, default=8, help="of the loop fully-async")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(argv)
