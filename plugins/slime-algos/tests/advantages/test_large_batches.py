"""Estimators that compare the samples of a group, at sizes at which a table of all pairs has no room, and against sums by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from slime_algos.advantages.opo import opo
from slime_algos.advantages.remax import remax
from slime_algos.advantages.trloo import trloo
from slime_algos.testing import view_of


def batch(n_groups, size):
    """Groups whose samples are not side by side, with turns, one greedy response each, and responses of 1 to 3 tokens."""
    draws = np.random.default_rng(7)
    groups = draws.permutation(np.repeat(np.arange(n_groups) * 3 - 5, size))
    rewards = draws.integers(0, 16, len(groups)) / 16
    turns, lengths = draws.integers(0, 3, len(groups)), draws.integers(1, 4, len(groups))
    greedy = np.zeros(len(groups), dtype=bool)
    greedy[np.unique(groups, return_index=True)[1]] = True
    view = view_of(
        [[1] * int(n) for n in lengths], rewards=rewards.tolist(), group_ids=torch.from_numpy(groups)
    )
    metadata = [
        {"turn": int(turn), "is_baseline": bool(one)} for turn, one in zip(turns, greedy, strict=True)
    ]
    return dataclasses.replace(view, train_metadata=metadata), groups, rewards, turns, lengths, greedy


def of_samples(estimator, view, lengths):
    """The advantage of each sample, from its first token."""
    advantages = estimator(view)[0].double().numpy()
    return advantages[np.cumsum(lengths) - lengths]


def test_each_sample_by_hand():
    view, groups, rewards, turns, lengths, greedy = batch(9, 8)
    wanted = {"trloo": [], "opo": [], "remax": []}
    for i, group in enumerate(groups):
        own = groups == group
        others = own & (turns == turns[i]) & (np.arange(len(groups)) != i)
        wanted["trloo"].append(rewards[i] - rewards[others].mean() if others.any() else 0.0)
        wanted["opo"].append(rewards[i] - (lengths * rewards)[own].sum() / lengths[own].sum())
        wanted["remax"].append(rewards[i] - rewards[own & greedy].mean())
    for estimator in (trloo, opo, remax):
        found = of_samples(estimator, view, lengths)
        np.testing.assert_allclose(found, wanted[estimator.__name__], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", [trloo, opo, remax])
def test_forty_thousand_samples(estimator):
    view, groups, _, _, lengths, _ = batch(5000, 8)
    found = of_samples(estimator, view, lengths)
    assert np.isfinite(found).all() and found.any()
    if estimator is opo:  # by its baseline, advantages of a group add up to nothing when weighed by length
        sums = np.bincount(groups + 5, weights=found * lengths)
        assert abs(sums).max() < 1e-5
