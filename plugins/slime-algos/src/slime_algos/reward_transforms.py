"""Reward transforms of single algorithms; `slime_core.rewards.transforms` has those that many share. numpy only.

All take raw rewards [N] and group ids [N], and return rewards [N] in float64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from slime_core.rewards.transforms import group_norm


def group_centre(raw_rewards: NDArray[np.floating], group_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each reward less its group's mean; 0 for a group of one."""
    return group_norm(raw_rewards, group_ids, disable_grpo_std_normalization=True)


def leave_one_out(raw_rewards: NDArray[np.floating], group_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each reward less the mean of the others of its group; 0 for a group of one."""
    return group_norm(raw_rewards, group_ids, disable_grpo_std_normalization=True, leave_one_out=True)


def gpg(raw_rewards: NDArray[np.floating], group_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return centred rewards times N / (rewards that are not 0): as if every sample had earned something.

    Source: verl `compute_gpg_outcome_advantage`. The paper (GPG, arXiv 2504.02546) scales by N / (N - M), M being the samples of groups
    whose rewards are all equal, which have no gradient: groups that are right throughout are among those, and samples of mixed
    groups that earned nothing are not.
    """
    earned = max(1, int(np.count_nonzero(raw_rewards)))
    scaled: NDArray[np.float64] = group_centre(raw_rewards, group_ids) * len(raw_rewards) / earned
    return scaled


def pass_at_k(
    raw_rewards: NDArray[np.floating],
    group_ids: NDArray[np.int64],
    *,
    passk_std_normalization: bool = False,
    passk_std_eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Return, for the best of each group, how far it is ahead of the second best; 0 for the others.

    The first of several best is taken. A group of one gets 0; verl refuses it. Samples of one execution (siblings) compete as others do: where
    executions have several, the best has no lead, and nothing is learnt.

    Args:
        raw_rewards: [N] rewards as scored.
        group_ids: [N] prompt group of each reward.
        passk_std_normalization: divide by the group's standard deviation (unbiased) + `passk_std_eps`.
        passk_std_eps: added to the standard deviation.

    Source: arXiv 2503.19595, eq. 7; verl `compute_grpo_passk_outcome_advantage`, which divides by default.
    """
    rewards = raw_rewards.astype(np.float64)
    credits = np.zeros_like(rewards)
    for group in np.unique(group_ids):
        members = np.flatnonzero(group_ids == group)
        if len(members) < 2:
            continue
        second, best = np.sort(rewards[members])[-2:]
        scale = rewards[members].std(ddof=1) + passk_std_eps if passk_std_normalization else 1.0
        credits[members[rewards[members].argmax()]] = (best - second) / scale if scale > 0 else 0.0
    return credits
