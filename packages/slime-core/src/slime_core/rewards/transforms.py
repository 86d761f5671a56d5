"""Reward transforms: from a step's raw rewards to those that the advantage estimator gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def group_norm(
    raw_rewards: NDArray[np.floating],
    group_ids: NDArray[np.int64],
    *,
    disable_grpo_std_normalization: bool = False,
    std_ddof: int = 1,
    std_eps: float = 1e-6,
    std_over_batch: bool = False,
    leave_one_out: bool = False,
) -> NDArray[np.float64]:
    """Return each reward's distance from its group's baseline, in standard deviations of the group.

    Groups are told apart by id, never by position, and may differ in size. A group of one, and a group of
    equal rewards, gets exactly 0: there is nothing to compare with.

    Args:
        raw_rewards: [N] rewards as scored.
        group_ids: [N] prompt group of each reward.
        disable_grpo_std_normalization: do not divide by `std + std_eps`; gives Dr. GRPO's centred rewards.
        std_ddof: 1 for the unbiased variance (torch's), 0 for the population's (numpy's).
        std_eps: added to the standard deviation.
        std_over_batch: take the standard deviation of all rewards of the step, not of the group's.
        leave_one_out: take the mean of the *other* rewards of the group as the baseline; samples that one execution fanned
            out into are others to each other.

    Returns:
        [N] float64.

    Raises:
        ValueError: `std_ddof` is neither 0 nor 1, or the arrays differ in length.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; slime/ray/rollout.py `_post_process_rewards`, which groups
    by position and takes a ragged batch for one group; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740.
    """
    if std_ddof not in (0, 1):
        raise ValueError(f"group-norm: std_ddof is {std_ddof}; wanted 0 or 1")
    if raw_rewards.shape != group_ids.shape or raw_rewards.ndim != 1:
        raise ValueError(
            f"group-norm: {raw_rewards.shape} rewards for {group_ids.shape} group ids; wanted two flat arrays"
        )
    rewards = raw_rewards.astype(np.float64)
    _, first, group, size = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    # Measured from one of its members, a group of equal rewards is all zeros without any rounding.
    rewards -= rewards[first][group]
    centred: NDArray[np.float64] = rewards - _group_sum(rewards, group)[group] / size[group]
    squares = _group_sum(centred**2, group)
    if leave_one_out:
        centred *= size[group] / np.maximum(size - 1, 1)[group]
    if disable_grpo_std_normalization:
        return centred
    scale = std_eps + (
        np.full_like(rewards, _std(raw_rewards.astype(np.float64), ddof=std_ddof))
        if std_over_batch
        else np.sqrt(squares / np.maximum(size - std_ddof, 1))[group]
    )
    scaled: NDArray[np.float64] = np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
    return scaled


def raw(raw_rewards: NDArray[np.floating], group_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the rewards as they are, as a new float64 array [N]."""
    return raw_rewards.astype(np.float64)


def _std(values: NDArray[np.float64], *, ddof: int) -> np.float64:
    squares: np.float64 = np.square(values - values.mean()).sum()
    deviation: np.float64 = np.sqrt(squares / max(len(values) - ddof, 1))
    return deviation


def _group_sum(values: NDArray[np.float64], group: NDArray[np.intp]) -> NDArray[np.float64]:
    return np.asarray(np.bincount(group, weights=values), dtype=np.float64)
