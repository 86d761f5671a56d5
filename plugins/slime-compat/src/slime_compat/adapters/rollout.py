"""Whole rollouts and evaluations by functions of the reference system: `fn(args, rollout_id, data_source, evaluation=False)`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slime_core.config.sections import RewardSection
from slime_core.errors import PluginError, SampleError
from slime_core.protocols import DataSource, GenerateContext, Metrics
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.execution import check_siblings
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.samples import Group, Sample, Status

from slime_compat.adapters.calling import Theirs
from slime_compat.adapters.generate import runtime_of, settle
from slime_compat.adapters.table import takes
from slime_compat.views.running.runtime import hold, using
from slime_compat.views.samples.data_source import DataSourceView
from slime_compat.views.samples.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_compat.views.samples.sample import viewed


class ReferenceRollout:
    """Calls a rollout function in a thread, as it blocks; what it awaits by `async_utils.run` runs on the run's event loop.

    Evaluations are its own, too, where no `--eval-function-path` is given, as there.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._caller = _Caller("slime.rollouts", path, run_args)
        self.evaluates = ReferenceEvaluation(path=path, run_args=run_args)
        """What evaluates where nothing else is chosen."""

    async def __call__(self, run: RolloutRun, step: int) -> list[Group]:
        """Return the groups of a step.

        Raises:
            PluginError: the function returned something else.
        """
        source = DataSourceView(run, asyncio.get_running_loop())
        answer, version = await self._caller.call(run, step, step - 1, source, evaluation=False)
        metrics: Metrics = {}
        if isinstance(answer, RolloutFnTrainOutput):
            metrics, answer = _numbers(answer.metrics), answer.samples
        if not isinstance(answer, list) or not answer:
            raise self._caller.theirs.refuse(answer)
        groups = [list(_flat(group, self._caller.theirs)) for group in answer]
        _number(groups)
        for sample in (sample for group in groups for sample in group):
            settle(sample, sample, sample.tokens, version=version)
        run.add_metrics(metrics)
        return groups


class ReferenceEvaluation:
    """Calls a function with `evaluation=True`, which returns the samples of each evaluation set. Args as `ReferenceRollout`."""

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._caller = _Caller("slime.eval_functions", path, run_args)

    async def __call__(
        self, run: RolloutRun, step: int, source: DataSource | None
    ) -> tuple[dict[str, list[Group]], Metrics]:
        """Return evaluation set -> its groups, and metrics.

        Raises:
            PluginError: the function returned something else.
        """
        theirs = self._caller.theirs
        given = DataSourceView(run, asyncio.get_running_loop())
        answer, version = await self._caller.call(run, step, max(0, step - 1), given, evaluation=True)
        metrics: Metrics = {}
        if isinstance(answer, RolloutFnEvalOutput):
            metrics, answer = _numbers(answer.metrics), answer.data
        if not isinstance(answer, Mapping) or not answer:
            raise theirs.refuse(answer)
        return {
            name: _groups(name, data, theirs, run.settings.reward, version) for name, data in answer.items()
        }, metrics


class _Caller:
    """Calls a rollout or evaluation function."""

    def __init__(self, group: str, path: str, run_args: Mapping[str, Any] | None) -> None:
        self.theirs = Theirs(group, path, run_args)
        self._says_evaluation = takes(self.theirs.function, "evaluation")

    async def call(
        self, run: RolloutRun, step: int, rollout_id: int, source: DataSourceView, *, evaluation: bool
    ) -> tuple[Any, str | None]:
        """Return what the function returned, and the oldest weights that answered."""
        if evaluation and not self._says_evaluation:
            raise PluginError(f"{self.theirs.who}: takes no `evaluation`; wanted {self.theirs.form}")
        context = GenerateContext(
            engine=AbortableEngine(run.engine, run.concurrency),
            tokenizer=run.tokenizer,
            capabilities=run.engine.capabilities,
            evaluation=evaluation,
            services=run.services,
        )
        runtime = await runtime_of(self.theirs.args, context, run=run, step=step)
        hold(runtime)
        more = {"evaluation": evaluation} if self._says_evaluation else {}
        function, args = self.theirs.function, runtime.args
        with using(runtime), runtime.server.noting(runtime.served), _named(self.theirs.who):
            if inspect.iscoroutinefunction(function):
                answer = await function(args, rollout_id, source, **more)
            else:
                call = functools.partial(function, args, rollout_id, source, **more)
                answer = await _in_thread(call)
        return answer, runtime.version


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Call a function that blocks in a thread of its own, which the end of the process does not wait for."""
    thread = DaemonThread("rollout-function")
    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, context.run, call)
    finally:
        thread.shutdown(wait=False)


@contextlib.contextmanager
def _named(who: str) -> Iterator[None]:
    """Add to an error of the block whose function raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {who}")
        raise


def _flat(group: Any, theirs: Theirs) -> Iterable[Sample]:
    """Yield the samples of a group; executions that fan out are lists in it.

    Raises:
        SampleError: samples of such a list have no `rollout_id`, or several.
    """
    if isinstance(group, Sample):
        yield group
        return
    if not isinstance(group, list) or not group:
        raise theirs.refuse(group)
    for one in group:
        samples = list(_flat(one, theirs))
        check_siblings(samples)
        yield from samples


def _number(groups: list[Group]) -> None:
    """Give numbers to samples that the function made itself: groups and samples go on after the highest."""
    samples = [sample for group in groups for sample in group]
    next_index = 1 + max((one.index for one in samples if one.index is not None), default=-1)
    next_group = 1 + max((one.group_index for one in samples if one.group_index is not None), default=-1)
    for group in groups:
        known = next((one.group_index for one in group if one.group_index is not None), None)
        if known is None:
            known, next_group = next_group, next_group + 1
        for sample in group:
            if sample.group_index is None:
                sample.group_index = known
            if sample.index is None:
                sample.index, next_index = next_index, next_index + 1


def _groups(name: str, data: Any, theirs: Theirs, reward: RewardSection, version: str | None) -> list[Group]:
    """Return the groups of an evaluation set from `rewards`, `truncated` and `samples` of it."""
    if not isinstance(data, Mapping) or not (data.get("samples") or data.get("rewards")):
        raise theirs.refuse(data)
    samples = list(data.get("samples") or [])
    rewards = data.get("rewards")
    if not samples:
        truncated = data.get("truncated") or [False] * len(rewards or [])
        samples = [_bare(index, cut) for index, cut in enumerate(truncated)]
    if rewards is not None and len(rewards) != len(samples):
        raise SampleError(
            f"{theirs.who}: {len(rewards)} rewards for {len(samples)} samples of {name!r}; wanted one for each"
        )
    key = reward.eval_reward_key or reward.reward_key
    groups: dict[int, Group] = {}
    for index, sample in enumerate(samples):
        viewed(sample)
        if sample.reward is None and rewards is not None:
            sample.reward = float(rewards[index]) if key is None else {key: float(rewards[index])}
        if sample.index is None:
            sample.index = index
        if sample.group_index is None:
            sample.group_index = sample.index
        sample.metadata.setdefault("source_name", name)
        settle(sample, sample, sample.tokens, version=version)
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _bare(index: int, truncated: Any) -> Sample:
    """Return a sample of which nothing but its end is known."""
    status = Status.TRUNCATED if truncated else Status.COMPLETED
    return Sample(index=index, group_index=index, status=status)


def _numbers(metrics: Mapping[str, Any] | None) -> Metrics:
    """Return metrics that are numbers, as floats."""
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}
