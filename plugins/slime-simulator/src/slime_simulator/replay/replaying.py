"""Replaying: loop, dispatcher and filter decide again, and their decisions are set beside the recorded ones."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from slime_core.config.derive import batch_sizes
from slime_core.plugins.registry import Registry
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.run.assemble import dropping_filter
from slime_core.run.run import Run
from slime_core.rundir.events import read_events
from slime_core.rundir.records import read_records
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Group, Sample

from slime_simulator.replay.concurrency import DecisionLog, RecordedLimit
from slime_simulator.replay.parts import ReplayedEngine, ReplayedPrompts, ReplayedTrainer
from slime_simulator.replay.recording import TRAINED, WANTED, Recording, decisions
from slime_simulator.replay.schedule import Schedule
from slime_simulator.scenario import NEVER_SIMULATED, having
from slime_simulator.simulation import make_run

#: Files of samples that are kept for the next group.
_OPEN_FILES = 8
_EVENTS = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the replay parts from the recording."""

    number: int
    """Of the decision, from 0."""
    recorded: Mapping[str, Any] | None
    """None where the run had told all its decisions."""
    replayed: Mapping[str, Any] | None
    """None where the replay made no more."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A run's decisions, made again."""

    recording: Recording
    decisions: list[dict[str, Any]]
    filtered: int
    """Groups that the filter decided on again, over their recorded samples."""
    unfiltered: int
    """Groups without recorded samples, for which the recorded verdict was taken."""

    @property
    def difference(self) -> Divergence | None:
        """Return the first decision that is not the recorded one; None where all are equal.

        A process that did not reach its last step may have decided more than it could tell.
        """
        recorded, replayed = self.recording.decisions, self.decisions
        for number, (old, new) in enumerate(zip(recorded, replayed, strict=False)):
            if old != new:
                return Divergence(number=number, recorded=old, replayed=new)
        n = min(len(recorded), len(replayed))
        if len(recorded) > n:
            return Divergence(number=n, recorded=recorded[n], replayed=None)
        if len(replayed) > n and self.recording.is_whole:
            return Divergence(number=n, recorded=None, replayed=replayed[n])
        return None


@dataclass(kw_only=True)
class PacedRun(Run):
    """A run that asks for the groups of a step when the recorded one did."""

    schedule: Schedule = field(default_factory=lambda: Schedule([]))
    recorded: Sequence[Mapping[str, Any]] = ()
    """Decisions."""

    @functools.cached_property
    def concurrency(self) -> ConcurrencyLimit:
        """A limit that had room when the recorded one had."""
        log = cast(DecisionLog, self.events)
        return RecordedLimit(self.settings.rollout.rollout_concurrency, self.engine, log, self.recorded)

    async def next_groups(self, step: int) -> list[Group]:
        """Wait, and return the groups that the dispatcher has for a step."""
        await self.schedule.reached((WANTED, step, 0))
        return await super().next_groups(step)


class Verdicts:
    """The filter of a recorded run, over the samples that it recorded.

    Args:
        recording: of the run.
        drop_reason: the filter.
    """

    def __init__(self, recording: Recording, drop_reason: Callable[[Group], str | None]) -> None:
        self._recording, self._drop_reason = recording, drop_reason
        self._read = functools.lru_cache(maxsize=_OPEN_FILES)(_groups_of)
        self.filtered = self.unfiltered = 0

    def __call__(self, group: Group) -> str | None:
        """Return the reason to drop the group that one sample stands for; None to keep it."""
        index = group[0].group_index or 0
        file = self._recording.files.get(index)
        recorded = self._read(file).get(index) if file is not None and file.is_file() else None
        if recorded is None:
            self.unfiltered += 1
            return self._recording.verdicts.get(index)
        self.filtered += 1
        return self._drop_reason(recorded)


def _groups_of(file: Path) -> dict[int, Group]:
    found: dict[int, Group] = {}
    for row in read_records(file):
        row.pop("dropped", None)
        sample = Sample.from_dict(row)
        found.setdefault(sample.group_index or 0, []).append(sample)
    return found


def replay(recording: Recording, registry: Registry) -> Replayed:
    """Make the decisions of a recorded run again, by its settings, from what happened and when.

    The loop, the dispatcher, its admission, the buffer and the filter are those of `slime train`. What happened is recorded: which
    group was finished when and how far others were, when the loop asked for a step's groups, and when weights arrived.
    """
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as folder:
        path = Path(folder) / _EVENTS
        verdicts = Verdicts(recording, dropping_filter(recording.settings, registry))
        run_in_virtual_time(_replay(recording, registry, verdicts, path))
        found = decisions(read_events(path))
    return Replayed(
        recording=recording, decisions=found, filtered=verdicts.filtered, unfiltered=verdicts.unfiltered
    )


async def _replay(recording: Recording, registry: Registry, verdicts: Verdicts, path: Path) -> None:
    # Weights are sent before an evaluation: when there is one stays, but it has no prompts.
    changed = {key: value for key, value in NEVER_SIMULATED.items() if key[0] != "eval"}
    settings = having(recording.settings, changed)
    real = batch_sizes(settings)
    sizes = replace(
        real, n_samples_per_prompt=1, global_batch_size=real.rollout_batch_size, num_steps_per_rollout=1
    )
    schedule = Schedule(recording.instants)
    engine = ReplayedEngine(recording.attempts, schedule)
    arrived = [key[1] for instant in recording.instants for key in instant.keys if key[0] == TRAINED]
    run = make_run(
        settings,
        registry,
        engine=engine,
        trainer=ReplayedTrainer(schedule, arrived),
        source=ReplayedPrompts(recording.attempts),
        sizes=sizes,
        scorer=cast(Scorer, engine),
        kind=functools.partial(
            PacedRun, schedule=schedule, recorded=recording.decisions, events=DecisionLog(path)
        ),
    )
    run.num_steps, run.drop_reason = recording.num_steps, verdicts
    run.events.start(1)
    loop = registry.resolve("slime.loops", settings.run.loop)
    work = asyncio.ensure_future(loop(run))
    clock = asyncio.ensure_future(schedule.run())
    try:
        await asyncio.wait({work, clock}, return_when=asyncio.FIRST_COMPLETED)
        failed = any(attempt.has_raised for each in recording.attempts.values() for attempt in each)
        if work.done() and not failed:
            work.result()
    finally:
        for task in (work, clock):
            task.cancel()
        await asyncio.wait({work, clock})
        await run.close()
