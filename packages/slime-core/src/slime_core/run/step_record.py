"""`StepRecord`: what is measured of one step; several may be open at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.data.buffers import groups_from_json, groups_to_json
from slime_core.protocols import Metrics
from slime_core.rundir.events import LOOP, EventLog
from slime_core.runtime.clock import now
from slime_core.samples import Group


@dataclass(kw_only=True)
class StepRecord:
    """Metrics, times and dropped groups of a step, from its first prompt to its last metric."""

    step: int
    """The step; 0 is before the first."""
    metrics: Metrics = field(default_factory=dict)
    dropped: list[tuple[Group, str]] = field(default_factory=list)
    """Scored groups that the step does not train on, each with the reason."""

    def copy(self) -> StepRecord:
        """Return the record as it is now."""
        return StepRecord(step=self.step, metrics=dict(self.metrics), dropped=list(self.dropped))

    @property
    def drops(self) -> Counter[str]:
        """Dropped groups by reason."""
        return Counter(reason for _, reason in self.dropped)

    @contextlib.contextmanager
    def timed(self, phase: str, events: EventLog, *, lane: str = LOOP) -> Iterator[None]:
        """Add the time of a block to `perf/<phase>_time`, seconds, and tell it as a span of the step.

        What was told before is written as the block begins, so that the file says meanwhile what the run is at.
        """
        events.hand_over()
        begin = now()
        try:
            yield
        finally:
            name, seconds = f"perf/{phase}_time", now() - begin
            self.metrics[name] = self.metrics.get(name, 0.0) + seconds
            events.span(phase, lane=lane, begin=begin, seconds=seconds, step=self.step)


def ahead_to_json(ahead: Mapping[int, tuple[StepRecord, list[Group]]]) -> list[dict[str, Any]]:
    """Return groups that were generated before their step, with their records, as JSON values.

    Raises:
        CheckpointError: a sample holds a value without a JSON form; names the sample and the field.
    """
    return [
        {
            "step": step,
            "metrics": record.metrics,
            "groups": groups_to_json(groups),
            "dropped": groups_to_json(group for group, _ in record.dropped),
            "reasons": [reason for _, reason in record.dropped],
        }
        for step, (record, groups) in ahead.items()
    ]


def ahead_from_json(values: Iterable[Mapping[str, Any]]) -> dict[int, tuple[StepRecord, list[Group]]]:
    """Return what `ahead_to_json` was given."""
    ahead = {}
    for each in values:
        dropped = zip(groups_from_json(each["dropped"]), each["reasons"], strict=True)
        record = StepRecord(step=each["step"], metrics=dict(each["metrics"]), dropped=list(dropped))
        ahead[record.step] = record, groups_from_json(each["groups"])
    return ahead
