"""The reward `verifiers`: that of a taskset written for verifiers v1, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from slime_core.errors import SampleError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.rewards.results import Grade
from slime_core.samples import Sample, Status

from slime_rm.adapters.taskset import LoadedTaskset

ROW_KEY = "verifiers"
"""Key of `Sample.metadata` under which a task's data travels to the reward."""


class VerifiersReward:
    """Scores a response by its task's own `@reward` and `@metric` functions and judges.

    The score is the weighted sum of the rewards; each is a part `reward_NAME`, each metric `metric_NAME`.

    Args:
        taskset: id of the taskset.
        taskset_args: its configuration.

    Source: verifiers 0.4.0, `Task.score` and `Trace.reward`.
    """

    def __init__(self, *, taskset: str | None, taskset_args: Mapping[str, Any] | None = None) -> None:
        self._taskset = LoadedTaskset(taskset, taskset_args or {})

    def __call__(self, sample: Sample) -> Grade:
        """Return the taskset's score of a sample.

        Raises:
            SampleError: the sample is not from the source `verifiers`.
        """
        row = sample.metadata.get(ROW_KEY)
        if not isinstance(row, Mapping):
            raise SampleError(
                f"{sample.name}: metadata has no {ROW_KEY!r}; use --data-source-path verifiers with this reward"
            )
        truncated = sample.status is Status.TRUNCATED
        response = up_to_special_tokens(sample.response)
        trace = asyncio.run(self._taskset.score(row, response, truncated=truncated))
        rewards = {f"reward_{name}": reward.score for name, reward in trace.rewards.items()}
        metrics = {f"metric_{name}": value for name, value in trace.metrics.items()}
        return Grade(score=trace.reward, parts=rewards | metrics)
