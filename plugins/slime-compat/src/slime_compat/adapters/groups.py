"""Functions of the reference system that see the buffer, samples and groups: the same calls, with `args` and samples as there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.protocols import WeakReason
from slime_core.samples import Group, Sample

from slime_compat.adapters.calling import Theirs
from slime_compat.views.running.tracking import logging_to
from slime_compat.views.samples.outputs import DynamicFilterOutput
from slime_compat.views.samples.sample import viewed, viewed_groups

_GROUP = "slime.rollout_hooks"


class ReferenceFilter:
    """Calls `fn(args, group) -> DynamicFilterOutput | bool`, True to keep the group.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.filters", path, run_args)

    def __call__(self, group: Group) -> str | None:
        """Return why a group is dropped, None to keep it.

        Raises:
            PluginError: the function returned something else.
        """
        answer = self._theirs.function(self._theirs.args, [viewed(sample) for sample in group])
        if isinstance(answer, DynamicFilterOutput):
            if answer.keep:
                return None
            reason = answer.reason or "filter"
            return WeakReason(reason) if answer.keep_when_insufficient else reason
        if isinstance(answer, bool) or type(answer).__name__ == "bool_" or type(answer).__name__ == "bool":
            return None if answer else "filter"
        raise self._theirs.refuse(answer)


class _Hook:
    """What the adapters below share. Args as `ReferenceFilter`."""

    flag = ""

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs(_GROUP, path, run_args, flag=self.flag)
        self._call, self._args = self._theirs.function, self._theirs.args


class BufferFilter(_Hook):
    """Calls `fn(args, rollout_id, buffer, num_samples) -> groups`; it takes out of the buffer what it returns."""

    flag = "--buffer-filter-path"

    def __call__(self, args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> Any:
        """Return the groups to generate next."""
        viewed_groups(buffer)
        return self._call(self._args.before(args), rollout_id, buffer, num_samples)


class SampleHook(_Hook):
    """Calls `hook(args, sample, *, rollout_id, evaluation) -> Sample | None`, sync or async."""

    flag = "--rollout-sample-hook-path"

    def __call__(
        self, args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False
    ) -> Any:
        """Show a sample that was generated and is not scored."""
        return self._call(
            self._args.before(args), viewed(sample), rollout_id=rollout_id, evaluation=evaluation
        )


class SampleFilter(_Hook):
    """Calls `fn(args, groups)`, which sets `remove_sample`."""

    flag = "--rollout-sample-filter-path"

    def __call__(self, args: Any, groups: list[Group]) -> Any:
        """Show the groups of a step."""
        viewed_groups(groups)
        return self._call(self._args.before(args), groups)


class AllSamples(_Hook):
    """Calls `fn(args, all_groups, get_samples)`."""

    flag = "--rollout-all-samples-process-path"

    def __call__(self, args: Any, all_groups: list[Group], get_samples: Callable[[int], list[Group]]) -> Any:
        """Show kept and dropped groups of a step."""
        viewed_groups(all_groups)

        def taken(n: int) -> list[Group]:
            groups = get_samples(n)
            viewed_groups(groups)
            return groups

        return self._call(self._args.before(args), all_groups, taken)


class Conversion(_Hook):
    """Calls `fn(args, samples) -> dict of lists`, the columns of the training batch."""

    flag = "--custom-convert-samples-to-train-data-path"

    def __call__(self, args: Any, samples: Sequence[Sample]) -> Any:
        """Return the columns."""
        return self._call(self._args.before(args), [viewed(sample) for sample in samples])


class RolloutLog(_Hook):
    """Calls `fn(rollout_id, args, samples, extra_metrics, rollout_time) -> bool`."""

    flag = "--custom-rollout-log-function-path"

    def __call__(
        self, rollout_id: int, args: Any, samples: list[Sample], metrics: Any, rollout_time: float
    ) -> Any:
        """Show a step's samples and metrics."""
        with logging_to(metrics):
            return self._call(
                rollout_id, self._args.before(args), [viewed(one) for one in samples], metrics, rollout_time
            )


class EvaluationLog(_Hook):
    """Calls `fn(rollout_id, args, data, extra_metrics) -> bool`."""

    flag = "--custom-eval-rollout-log-function-path"

    def __call__(self, rollout_id: int, args: Any, data: Mapping[str, Any], metrics: Any) -> Any:
        """Show an evaluation's samples and metrics."""
        for entry in data.values():
            for sample in entry["samples"]:
                viewed(sample)
        with logging_to(metrics):
            return self._call(rollout_id, self._args.before(args), data, metrics)
