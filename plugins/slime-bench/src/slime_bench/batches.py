"""`slime bench batches`: seconds until ranks on Ray have a step's batch, beside a plain copy of its memory."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from slime_core.config.build import BuildContext
from slime_core.config.factories import TrainerFactory
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics, TrainerCapabilities
from slime_core.run.run import Run
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.testing.tabular import TabularTrainer

_TABULAR = "slime_core.testing.tabular:"
_PROMPT, _RESPONSE = 512, 16_384
#: Bytes of a token of a response: its id, and float32 mask, log-prob and weight.
_TOKEN_BYTES = 16
#: Metric: the sum of the largest entry of each column.
_LARGEST = "perf/largest"
#: Seconds between two batches, as training lies between them: the store has freed the last one by then.
_PAUSE_S = 0.5
#: Batches before those that are measured: the store's memory is new to the first ones.
_FIRST = 3
#: What is measured, in the order of the table.
WAYS = ("plain copy", "ranks have it", "ranks have read it")


class ReadingTrainer(TabularTrainer):
    """Reads every byte of a batch, and learns nothing; its phase is the reading, in seconds of the machine's clock."""

    capabilities = TrainerCapabilities(transports=("memory",), ranked=True, phases=True)

    def __init__(self, number: int) -> None:
        super().__init__(estimator=None, loss=None, lr=0.0)
        self._number, self._phases = number, list[Phase]()

    async def train(self, batch: TrainBatch) -> Metrics:
        """Read."""
        begin = time.monotonic()
        found = largest(batch)
        self._phases = [Phase("read", self._number, begin, time.monotonic() - begin)]
        return {_LARGEST: found}

    async def phases(self) -> list[Phase]:
        """Return when it read."""
        return self._phases


def _trainer(build: BuildContext) -> ReadingTrainer:
    return ReadingTrainer(build.rank.number)


#: Builds the trainer.
create_trainer = TrainerFactory(_trainer, ReadingTrainer.capabilities)


def batches(argv: list[str]) -> int:
    """Measure how fast ranks of launcher `ray` on this machine get a batch, beside a plain copy of its memory.

    The copy is numpy's, on one thread, into memory that is there. Ranks have the batch when their trainers are called with
    it, and have read it when they have answered. The ways take turns, after three that are not counted: the store's memory
    is new to the first batches. Exit status 1 when a rank has read something else.
    """
    arguments = _parse(argv)
    batch = make_batch(arguments.mebibytes << 20)
    registry = Registry.from_environment()
    with tempfile.TemporaryDirectory(prefix="slime-bench-batches-") as name:
        settings = load_settings([], _flags(Path(name), arguments.ranks), registry=registry)

        async def use(run: Run) -> tuple[list[list[float]], bool]:
            try:
                await run.trainer.start()
                return await _turns(run, batch, arguments.repeats)
            finally:
                await run.close()

        launch = registry.resolve("slime.launchers", settings.run.launcher)
        times, is_right = launch(settings, registry, use)
    _print(times, sum(each.nbytes for each in columns(batch)), arguments)
    return 0 if is_right else 1


async def _turns(run: Run, batch: TrainBatch, repeats: int) -> tuple[list[list[float]], bool]:
    """Return the seconds of each way and turn, the first ones too, and whether rank 0 read what it was given."""
    times: list[list[float]] = [[] for _ in WAYS]
    copies = [each.copy() for each in columns(batch)]
    wanted, is_right = largest(batch), True
    for turn in range(_FIRST + repeats):
        await asyncio.sleep(_PAUSE_S)
        begin = time.monotonic()
        for copy, each in zip(copies, columns(batch), strict=True):
            np.copyto(copy, each)
        seconds = [time.monotonic() - begin]
        begin = time.monotonic()
        metrics = await run.trainer.train(dataclasses.replace(batch, step=turn + 1))
        read = time.monotonic() - begin
        seconds += [max(phase.begin for phase in await run.trainer.phases()) - begin, read]
        is_right = is_right and metrics[_LARGEST] == wanted
        for way, found in zip(times, seconds, strict=True):
            way.append(found)
    return times, is_right


def make_batch(n_bytes: int) -> TrainBatch:
    """Return samples of 512 and 16,384 tokens in one optimizer step; the columns of all have about so many bytes."""
    n = max(1, n_bytes // (_TOKEN_BYTES * _RESPONSE + 4 * _PROMPT))
    draw = np.random.default_rng(0)

    def column() -> NDArray[np.float32]:
        return draw.random(n * _RESPONSE, dtype=np.float32)

    return TrainBatch(
        step=1,
        tokens=draw.integers(0, 1 << 17, n * (_PROMPT + _RESPONSE), dtype=np.int32),
        offsets=np.arange(n + 1) * (_PROMPT + _RESPONSE),
        response_offsets=np.arange(n + 1) * _RESPONSE,
        loss_mask=np.ones(n * _RESPONSE, dtype=np.float32),
        rollout_log_probs=-column(),
        teacher_log_probs=None,
        rewards=draw.random(n, dtype=np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=np.arange(n),
        group_ids=np.arange(n) // 8,
        rollout_ids=np.arange(n),
        truncated=np.zeros(n, dtype=np.bool_),
        optimizer_steps=(np.arange(n),),
        weights=column(),
        temperature=1.0,
    )


def columns(batch: TrainBatch) -> list[NDArray[np.generic]]:
    """Return the arrays of a batch."""
    held = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return [*(value for value in held if isinstance(value, np.ndarray)), *batch.optimizer_steps]


def largest(batch: TrainBatch) -> float:
    """Return the sum of the largest entry of each array, for which every byte is read."""
    return float(sum(float(each.max()) for each in columns(batch)))


def _print(times: Sequence[Sequence[float]], n_bytes: int, arguments: argparse.Namespace) -> None:
    heads = ("", "ms", "GB/s", "of the plain copy", "the first, ms")
    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for way, seconds in zip(WAYS, times, strict=True):
        counted = seconds[_FIRST:]
        middle = median(counted)
        shown = f"{middle * 1e3:.0f} ({min(counted) * 1e3:.0f} to {max(counted) * 1e3:.0f})"
        ratio = median(times[0][_FIRST:]) / middle
        table.add_row(way, shown, f"{n_bytes / middle / 1e9:.1f}", f"{ratio:.2f}", f"{seconds[0] * 1e3:.0f}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"batch of {n_bytes / 2**20:.0f} MiB to {arguments.ranks} ranks; median of {arguments.repeats} (lowest to highest)"
    )
    console.print(table)


def _flags(folder: Path, ranks: int) -> list[str]:
    (folder / "prompts.jsonl").write_text('{"input": "a", "label": "b"}\n')
    given = {
        "hf-checkpoint": str(folder), "tokenizer": f"{_TABULAR}load_tokenizer", "label-key": "label",
        "prompt-data": str(folder / "prompts.jsonl"), "output-dir": str(folder), "run-name": "batches", "tracker": "jsonl",
        "rollout-engine": f"{_TABULAR}create_engine", "train-backend": "slime_bench.batches:create_trainer",
        "advantage-estimator": f"{_TABULAR}credit", "loss-type": f"{_TABULAR}reinforce", "loss-reducer": f"{_TABULAR}per_token",
        "rm-type": f"{_TABULAR}next_letter", "rollout-batch-size": "1", "rollout-max-response-len": "8", "num-rollout": "1",
        "launcher": "ray", "ray-device": "cpu", "actor-num-gpus-per-node": str(ranks),
    }  # fmt: skip
    return [word for key, value in given.items() for word in (f"--{key}", value)]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench batches", description=batches.__doc__)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the batch")
    parser.add_argument("--ranks", type=int, default=2, help="processes that get it")
    parser.add_argument("--repeats", type=int, default=9, help="turns that each way has")
    return parser.parse_args(argv)
