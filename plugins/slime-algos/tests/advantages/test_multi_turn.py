"""Discounting over turns, by hand."""

from slime_algos.advantages.multi_turn import multi_turn
from slime_algos.testing import view_of


def test_turns_are_discounted_by_the_turns_that_follow():
    view = view_of([[1, 1, 0, 1, 0, 0, 1], [1]], rewards=[8.0, 1.0])
    advantages, _ = multi_turn(view, turn_discount=0.5)
    assert (advantages * view.loss_mask).tolist() == [2.0, 2.0, 0, 4.0, 0, 0, 8.0, 1.0]


def test_two_samples_next_to_each_other_are_two_turns():
    advantages, _ = multi_turn(view_of([[1, 1], [1, 1]], rewards=[1.0, 1.0]), turn_discount=0.5)
    assert advantages.tolist() == [1.0] * 4
