"""What rollout, evaluation and filter functions of the reference system return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime_compat.views.samples.sample import ReferenceSample as Sample


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on, and metrics of the step."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Evaluation set -> `rewards`, `truncated` and `samples`, and metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained on, and why not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


class MetricGatherer:
    """Counts what a filter dropped, and why."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a group; one without a reason does not count."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in self._dropped.items()}


def iter_samples(nested: Sample | Iterable[Any]) -> Iterator[Sample]:
    """Yield the samples of groups, however deep they are nested."""
    if isinstance(nested, Sample):
        yield nested
        return
    for one in nested:
        yield from iter_samples(one)


def call_dynamic_filter(fn: Any, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter; one that returns a bool gives no reason."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    answer = fn(*args, **kwargs)
    return answer if isinstance(answer, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(answer))


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function; what it returns bare is put into the output that it means."""
    answer = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(answer, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return answer
    return RolloutFnEvalOutput(data=answer) if evaluation else RolloutFnTrainOutput(samples=answer)
