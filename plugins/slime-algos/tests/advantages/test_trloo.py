"""The estimator `trloo`, by hand and against `rloo`."""

import dataclasses

import torch
from slime_algos.advantages.trloo import trloo
from slime_algos.testing import view_of
from slime_core.rewards.transforms import group_norm


def view(turns, rewards, groups, tokens=None):
    made = view_of(tokens or [[1]] * len(rewards), rewards=rewards, group_ids=torch.tensor(groups))
    metadata = None if turns is None else [{"turn": turn} for turn in turns]
    return dataclasses.replace(made, train_metadata=metadata)


def test_a_turn_is_compared_with_the_same_turn_of_the_others():
    # turn 0: 1 - (3 + 5)/2 = -3, 3 - (1 + 5)/2 = 0, 5 - (1 + 3)/2 = 3; turn 1: 4 - 2 = 2, 2 - 4 = -2; turn 2: alone
    turns, rewards = [0, 1, 2, 0, 1, 0], [1.0, 4.0, 9.0, 3.0, 2.0, 5.0]
    assert trloo(view(turns, rewards, [8] * 6))[0].tolist() == [-3.0, 2.0, 0.0, 0.0, -2.0, 3.0]


def test_groups_are_kept_apart_and_every_token_of_a_turn_gets_the_same():
    found = trloo(view([0, 0, 0], [1.0, 4.0, 9.0], [0, 0, 5], tokens=[[1, 1], [1], [1]]))[0]
    assert found.tolist() == [-3.0, -3.0, 3.0, 0.0]


def test_without_turns_it_is_leave_one_out():
    rewards, groups = [0.1, 0.3, 1.3, 0.0], [0, 0, 0, 0]
    expected = group_norm(
        torch.tensor(rewards).numpy(),
        torch.tensor(groups).numpy(),
        disable_grpo_std_normalization=True,
        leave_one_out=True,
    )
    torch.testing.assert_close(
        trloo(view(None, rewards, groups))[0].double(), torch.tensor(expected), rtol=1e-6, atol=1e-7
    )
