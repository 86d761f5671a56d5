"""The sums of metrics over the micro-batches of an optimizer step."""

from __future__ import annotations

import torch
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device


def test_they_are_those_of_float32_numbers_whatever_kind_a_metric_is_of():
    from slime_megatron.optim.train_step import _sums

    third = torch.tensor(1 / 3)
    shares = [
        {"loss": third, "count": torch.tensor(2), "held": torch.tensor(True), "plain": 0.1},
        {"loss": third, "count": torch.tensor(3), "held": torch.tensor(True), "plain": 0.2},
    ]
    found = _sums(shares)
    # 2/3 in float32: 11184811 / 2**24
    assert found == {"loss": 11184811 / 2**24, "count": 5.0, "held": 2.0, "plain": 0.1 + 0.2}
    assert all(type(value) is float for value in found.values())
    assert _sums([]) == {}


def test_the_host_waits_once_for_all_metrics_of_an_optimizer_step():
    from slime_megatron.optim.train_step import _sums

    with cuda_without_device() as counted:
        share = {name: torch.empty((), device=CUDA) for name in ("loss", "pg_loss", "ppo_kl")}
        found = _sums([share | {"plain": 1.0}] * 4)
    assert found.keys() == {"loss", "pg_loss", "ppo_kl", "plain"}
    assert counted.waits == ["tolist"]
