"""Reward transforms of single algorithms, by hand."""

import subprocess
import sys

import numpy as np
import pytest
from slime_algos.reward_transforms import gpg, group_centre, leave_one_out, pass_at_k

RAGGED = [0, 0, 0, 4, 4, 9]


def of(transform, rewards, groups, **options):
    return transform(np.array(rewards, dtype=np.float64), np.array(groups), **options).tolist()


def test_centring_takes_the_groups_mean_away():
    assert of(group_centre, [3, 0, 0, 5, 1, 7], RAGGED) == pytest.approx([2, -1, -1, 2, -2, 0])


def test_leave_one_out_takes_the_mean_of_the_others_away():
    assert of(leave_one_out, [3, 0, 0, 5, 1, 7], RAGGED) == pytest.approx([3, -1.5, -1.5, 4, -4, 0])


def test_gpg_scales_as_if_every_sample_had_earned_something():
    # 4 of 6 rewards are not 0
    assert of(gpg, [3, 0, 0, 5, 1, 7], RAGGED) == pytest.approx([3, -1.5, -1.5, 3, -3, 0])
    assert of(gpg, [0, 0], [1, 1]) == [0, 0]
    # By 4/3, as verl, and not by the paper's 4/2: a group whose rewards are all equal has no gradient.
    assert of(gpg, [1, 1, 1, 0], [0, 0, 1, 1]) == pytest.approx([0, 0, 2 / 3, -2 / 3])


def test_pass_at_k_credits_the_best_alone():
    assert of(pass_at_k, [1, 3, 2.5, 5, 5, 7], RAGGED) == [0, 0.5, 0, 0, 0, 0]


def test_pass_at_k_divides_by_the_standard_deviation_when_it_is_told_to():
    (_, best) = of(pass_at_k, [0, 2], [0, 0], passk_std_normalization=True, passk_std_eps=0.0)
    assert best == pytest.approx(2 / 2**0.5)


def test_transforms_need_no_torch():
    code = "import sys, slime_algos.reward_transforms; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
