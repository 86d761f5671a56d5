"""REINFORCE++, by hand."""

from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus
from slime_algos.testing import view_of


def test_reinforce_plus_plus_discounts_over_trained_tokens():
    view = view_of([[1, 0, 1, 1], [0, 0]], rewards=[8.0, 5.0])
    advantages, returns = reinforce_plus_plus(view, gamma=0.5)
    assert advantages.tolist() == returns.tolist() == [2.0, 0.0, 4.0, 8.0, 0.0, 0.0]
