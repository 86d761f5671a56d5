"""The learning rate, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from slime_core.config.sections import TrainSection


def rates(steps, *, total_steps=None, **train):
    """Return the learning rates of the first optimizer steps."""
    from slime_megatron.optim.optimizer import build_scheduler, learning_rate

    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = build_scheduler(optimizer, TrainSection(**train), total_steps=total_steps)
    found = []
    for _ in range(steps):
        found.append(learning_rate(optimizer))
        scheduler.step(1)
    return found


def test_constant_rate_needs_no_number_of_steps():
    assert rates(3, lr=2e-3) == [2e-3] * 3


def test_warm_up_rises_from_zero_in_equal_parts():
    assert rates(6, lr=4e-3, lr_warmup_iters=4) == pytest.approx([0, 1e-3, 2e-3, 3e-3, 4e-3, 4e-3])


def test_linear_decay_after_warm_up_ends_at_the_minimum():
    # 2 steps up, then from 1.0 to 0.2 in 4 steps of 0.2, then 0.2.
    found = rates(8, lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=6)
    assert found == pytest.approx([0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_over_the_whole_run():
    # (1 + cos(pi k / 4)) / 2 for k = 0 to 4.
    found = rates(5, total_steps=4, lr=1.0, lr_decay_style="cosine")
    assert found == pytest.approx([1.0, 0.8535533906, 0.5, 0.1464466094, 0.0])
