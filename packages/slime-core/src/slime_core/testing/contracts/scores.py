"""Kits of what scores and weighs: rewards, group rewards, filters, reward transforms and reducers."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import ContractError
from slime_core.protocols import ReductionView
from slime_core.rewards.results import Failed, group_values, plain_value
from slime_core.rewards.workers.calling import build_reward
from slime_core.samples import Group, Sample
from slime_core.testing.contracts.promises import answering, group_of, name_of, require, sample_of

Options = Mapping[str, Any]


def check_reward(
    reward: Callable[..., Any], samples: Sequence[Sample] | None = None, *, options: Options | None = None
) -> None:
    """Check a reward: it takes its options, and scores each sample by a finite number, a `Grade` or a dict of JSON values.

    Args:
        reward: a function, sync or async, or a class.
        samples: that it can score; two answers to `1+1=` when not given.
        options: its keyword-only parameters.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"reward {name_of(reward)}"
    with answering(where, "an object built from the options"):
        score = build_reward(reward, options or {})
    for sample in [sample_of("2"), sample_of("three")] if samples is None else samples:
        value = plain_value(_answer(where, score, copy.deepcopy(sample)))
        if isinstance(value, Failed):
            raise ContractError(f"{where}: {sample.name}: {value.what}")


def check_group_reward(
    reward: Callable[..., Any], group: Group | None = None, *, options: Options | None = None
) -> None:
    """Check a group reward: one score for each sample of a group, in order; see `check_reward`.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"group reward {name_of(reward)}"
    with answering(where, "an object built from the options"):
        score = build_reward(reward, options or {})
    samples = group_of([1.0, 0.0, 1.0]) if group is None else group
    for value in group_values(_answer(where, score, copy.deepcopy(samples)), len(samples)):
        if isinstance(value, Failed):
            raise ContractError(f"{where}: {value.what}")


def check_filter(
    function: Callable[..., Any],
    groups: Sequence[Group] | None = None,
    *,
    options: Options | None = None,
) -> None:
    """Check a filter: None to keep a group or a reason as text, the same for the same group, which it leaves as it is.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"filter {name_of(function)}"
    for group in [group_of([1.0, 0.0, 1.0]), group_of([1.0, 1.0])] if groups is None else groups:
        given = copy.deepcopy(group)
        with answering(where, "None or a reason"):
            answers = [function(given, **(options or {})) for _ in range(2)]
        for answer in answers:
            is_reason = isinstance(answer, str) and bool(answer)
            wanted = "None to keep the group, or the reason to drop it, as text"
            require(answer is None or is_reason, where, found=repr(answer), wanted=wanted)
        require(answers[0] == answers[1], where, found=f"{answers} of one group", wanted="the same answer")
        require(given == group, where, found="a group that it changed", wanted="one that is left as it is")


#: (Rewards, groups): groups that are interleaved and of several sizes, one of equal rewards, of one sample.
_REWARDS = (
    ([1.0, 0.0, 0.5, 0.0, 1.0, 0.25], [7, 3, 7, 3, 7, 3]),
    ([1.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 0, 1, 1]),
    ([0.5], [4]),
)


def check_reward_transform(function: Callable[..., Any], *, options: Options | None = None) -> None:
    """Check a reward transform: a finite number for each reward, whatever the groups; its arrays are left as they are.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"reward transform {name_of(function)}"
    for rewards, groups in _REWARDS:
        given = np.array(rewards), np.array(groups, dtype=np.int64)
        with answering(f"{where}: rewards {rewards} of groups {groups}", "rewards [N]"):
            out = function(*given, **(options or {}))
        _check_array(where, out, len(rewards), "rewards [N] float64, finite")
        untouched = given[0].tolist() == rewards and given[1].tolist() == groups
        require(untouched, where, found="an argument that it changed", wanted="a new array")


#: Loss masks of the samples of a step, and the execution of each.
_MASKS: tuple[tuple[Sequence[Sequence[int]], Sequence[int]], ...] = (
    ([[1, 1, 0], [1], [1, 0, 1, 1]], [0, 0, 1]),
    ([[0, 0], [1, 1, 1]], [0, 1]),
    ([[0], [0, 0]], [0, 1]),
)


def check_reducer(function: Callable[..., Any], *, options: Options | None = None) -> None:
    """Check a reducer: a finite weight for each token, 0 where the loss mask is 0, also where no token is trained on.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"reducer {name_of(function)}"
    for masks, executions in _MASKS:
        mask = np.array([token for sample in masks for token in sample], dtype=np.float64)
        view = ReductionView(
            loss_mask=mask.copy(),
            response_lengths=np.array([len(sample) for sample in masks], dtype=np.int64),
            rollout_ids=np.array(executions, dtype=np.int64),
        )
        with answering(f"{where}: masks {masks}", "weights [T]"):
            out = function(view, **(options or {}))
        weights = _check_array(where, out, len(mask), f"weights [T] float64, finite, for the masks {masks}")
        masked = weights[mask == 0]
        require(not masked.any(), where, found=f"the weights {masked} of masked tokens", wanted="0")
        same = bool((view.loss_mask == mask).all())
        require(same, where, found="a loss mask that it changed", wanted="a new array")


def _answer(where: str, score: Callable[[Any], Any], given: Any) -> Any:
    """Return what a reward says, awaited if need be."""

    async def wait(answer: Any) -> Any:
        return await answer

    with answering(where, "a score"):
        answer = score(given)
        return asyncio.run(wait(answer)) if inspect.isawaitable(answer) else answer


def _check_array(where: str, out: Any, length: int, wanted: str) -> NDArray[np.float64]:
    is_array = isinstance(out, np.ndarray) and np.issubdtype(out.dtype, np.floating)
    require(is_array, where, found=f"{type(out).__name__} {str(out)[:60]}", wanted=wanted)
    array: NDArray[np.float64] = out
    require(array.shape == (length,), where, found=f"the shape {array.shape} for {length}", wanted=wanted)
    require(bool(np.isfinite(array).all()), where, found=array, wanted=wanted)
    return array
