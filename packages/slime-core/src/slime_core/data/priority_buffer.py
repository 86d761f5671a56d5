"""The buffer `priority`: what waits is taken by its priority, then by the age of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.data.buffers import FifoBuffer
from slime_core.errors import SampleError
from slime_core.samples import Group

#: Key of a sample's metadata: its group's priority, a number; 0 where there is none.
PRIORITY = "priority"
#: Most that it may be, either way.
_MOST = 1e15


class PriorityBuffer:
    """Groups, the highest priority first; satisfies `protocols.Buffer`.

    A group's priority is the highest `metadata["priority"]` of its samples, which a data row, a generator or a hook sets.
    Of equal ones, those with tokens of the oldest weights come first (they are the next to become too old), then those that
    were put first.

    Args:
        n_samples_per_prompt: executions of the prompt of each group that is restored; None takes any number.
    """

    def __init__(self, n_samples_per_prompt: int | None = None) -> None:
        self._groups = FifoBuffer(n_samples_per_prompt)

    def __len__(self) -> int:
        """Return the number of groups held."""
        return len(self._groups)

    def put(self, groups: Sequence[Group]) -> None:
        """Add groups.

        Raises:
            SampleError: a group is empty, or its priority is no number; none is added.
        """
        for group in groups:
            _priority(group)
        self._groups.put(groups)

    def take(self, n_groups: int) -> list[Group]:
        """Remove and return the first `n_groups` groups, or all where there are fewer."""
        waiting = self._groups.take(len(self._groups))
        first = sorted(range(len(waiting)), key=lambda number: (*_rank(waiting[number]), number))[:n_groups]
        taken = set(first)
        self._groups.put([group for number, group in enumerate(waiting) if number not in taken])
        return [waiting[number] for number in first]

    def state(self) -> dict[str, Any]:
        """Return the whole content, as JSON values; raises as `FifoBuffer.state` does."""
        return self._groups.state()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return what makes `state` as it is now."""
        return self._groups.snapshot()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on the content that `state` returned; raises as `FifoBuffer.restore` does."""
        self._groups.restore(state)


def create_buffer(build: BuildContext) -> PriorityBuffer:
    """Build the buffer `priority`: the highest `metadata["priority"]` first, then the oldest weights."""
    return PriorityBuffer(build.settings.rollout.n_samples_per_prompt)


def _rank(group: Group) -> tuple[float, float]:
    versions = [sample.weight_versions[0] for sample in group if sample.weight_versions]
    oldest = min((int(version) for version in versions if version.isdecimal()), default=math.inf)
    return -_priority(group), oldest


def _priority(group: Group) -> float:
    values = [sample.metadata.get(PRIORITY, 0) for sample in group] or [0]
    for sample, value in zip(group, values, strict=False):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
            raise SampleError(
                f"{sample.name}: metadata {PRIORITY!r} is {str(value)[:60]!r}; wanted a number of at most {_MOST:g}"
            )
    return float(max(values))
