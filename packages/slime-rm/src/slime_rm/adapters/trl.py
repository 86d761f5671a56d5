"""The rewards `trl`: reward functions that were written for TRL's trainers."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.samples import Group, Sample

from slime_rm.adapters.loading import load_function


class TrlGroupReward:
    """Calls a TRL reward function once for a group: lists of prompts, completions and columns, one entry a sample.

    Args:
        path: file or module.
        function: name of the function there.
        label_as: column that the label becomes, `solution` for TRL's own functions.
        conversational: hand completions over as chat messages; when not given, where the prompt is chat messages.

    Source: TRL 1.16.0, GRPOTrainer's `reward_funcs`: keyword arguments `prompts`, `completions`, `completion_ids` and the
    data set's columns, here the row's metadata.
    """

    def __init__(
        self, *, path: str, function: str, label_as: str = "solution", conversational: bool | None = None
    ) -> None:
        self._function = load_function(path, function)
        self._name = f"{path}:{function}"
        self._label_as = label_as
        self._conversational = conversational

    def __call__(self, group: Group) -> list[float]:
        """Return the function's score of each sample.

        Raises:
            RewardError: it returned another number of scores, or None, TRL's word for "not mine".
        """
        scores = self._function(**self._arguments(group))
        if inspect.iscoroutine(scores):
            scores = asyncio.run(scores)
        if not isinstance(scores, list | tuple) or len(scores) != len(group):
            raise RewardError(
                f"{self._name} returned {type(scores).__name__} of {len(scores) if hasattr(scores, '__len__') else '?'}; "
                f"wanted a list of {len(group)} scores"
            )
        for sample, score in zip(group, scores, strict=True):
            if score is None:
                raise RewardError(
                    f"{self._name} returned None for {sample.name}, as a TRL function does for samples of another task; "
                    "let rows choose their reward by metadata['rm_type']"
                )
        return list(scores)

    def _arguments(self, group: Group) -> dict[str, Any]:
        columns = sorted({key for sample in group for key in sample.metadata} - {"rm_type"})
        arguments: dict[str, Any] = {key: [sample.metadata.get(key) for sample in group] for key in columns}
        arguments[self._label_as] = [sample.label for sample in group]
        return arguments | {
            "prompts": [sample.prompt for sample in group],
            "completions": [self._completion(sample) for sample in group],
            "completion_ids": [sample.response_tokens for sample in group],
        }

    def _completion(self, sample: Sample) -> Any:
        chat = isinstance(sample.prompt, list) if self._conversational is None else self._conversational
        response = up_to_special_tokens(sample.response)
        return [{"role": "assistant", "content": response}] if chat else response


class TrlReward:
    """Calls a TRL reward function for one sample: `TrlGroupReward` on a group of one, with the same options."""

    def __init__(
        self, *, path: str, function: str, label_as: str = "solution", conversational: bool | None = None
    ) -> None:
        self._group = TrlGroupReward(
            path=path, function=function, label_as=label_as, conversational=conversational
        )

    def __call__(self, sample: Sample) -> float:
        """Return the function's score of a sample."""
        return self._group([sample])[0]
