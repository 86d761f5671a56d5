"""What rollout, evaluation and filter functions of the reference system return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_compat.views.sample import ReferenceSample as Sample


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
