"""The estimator `opo`, by hand."""

import torch
from slime_algos.advantages.opo import opo
from slime_algos.testing import view_of


def test_opo_weighs_the_baseline_by_length():
    # group 0: (1·2 + 4·1)/3 = 2; group 1: alone; the masked token does not count
    view = view_of([[1, 1], [1, 0], [1]], rewards=[1.0, 4.0, 9.0], group_ids=torch.tensor([0, 0, 5]))
    assert opo(view)[0].tolist() == [-1.0, -1.0, 2.0, 2.0, 0.0]
