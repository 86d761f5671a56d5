"""The reward `verl`: a reward file that was written for verl."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from slime_core.errors import RewardError, SampleError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.samples import Sample

from slime_rm.adapters.loading import load_function


class VerlReward:
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)` of a verl reward file.

    `data_source` and `extra_info` come from the row's metadata, which are columns of their own in verl's data files:
    `metadata_key = "*"` reads them. A number, or a dict whose `score` is one, is the reward.

    Args:
        path: file or module; verl's `custom_reward_function.path`.
        function: verl's `custom_reward_function.name`.
        reward_kwargs: further arguments; verl's `custom_reward_function.reward_kwargs`.
        data_source: for rows whose metadata has none.

    Source: verl 0.9.1, `verl/trainer/ppo/reward.py` and the naive reward manager.
    """

    def __init__(
        self,
        *,
        path: str,
        function: str = "compute_score",
        reward_kwargs: Mapping[str, Any] | None = None,
        data_source: str | None = None,
    ) -> None:
        self._function = load_function(path, function)
        self._kwargs = dict(reward_kwargs or {})
        self._data_source = data_source

    def __call__(self, sample: Sample) -> float | dict[str, Any]:
        """Return the file's score of a sample.

        Raises:
            SampleError: there is no data source.
            RewardError: the function returned a dict without `score`.
        """
        data_source = sample.metadata.get("data_source", self._data_source)
        if data_source is None:
            raise SampleError(
                f"{sample.name}: metadata has no 'data_source'; set metadata_key to '*' where it is a column, add it to the rows, or set data_source in rm_args"
            )
        result = self._function(
            data_source=data_source,
            solution_str=up_to_special_tokens(sample.response),
            ground_truth=_ground_truth(sample),
            extra_info=sample.metadata.get("extra_info") or {},
            **self._kwargs,
        )
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if isinstance(result, dict) and "score" not in result:
            raise RewardError(f"a verl reward returned a dict with the keys {sorted(result)}; wanted 'score'")
        return result  # type: ignore[no-any-return]  # the pool checks what any reward returns


def _ground_truth(sample: Sample) -> Any:
    """Return what verl's data files have in `reward_model`, which need not be text; the label where there is no such column."""
    reward_model = sample.metadata.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return sample.label
