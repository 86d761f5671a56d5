"""Losses of tensors of the device cuda that have no data: needs no GPU, and computes nothing. No backward pass."""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points

import pytest
import torch
from slime_algos.testing import random_view
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device

LOSSES = {
    plugin.name: plugin.load()
    for plugin in entry_points(group="slime.losses")
    if plugin.value.startswith("slime_algos.")
}
#: Losses for which the host waits, once for each number of tokens that it has to know: those that select tokens by covariance.
WAITS = {"clip_cov_loss": 2, "kl_cov_loss": 1}
EVERYTHING = {
    "entropy_coef": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_opsm": True,
    "staleness_metrics": True,
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "with all terms"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_stays_on_the_device_and_its_metrics_wait_for_nothing(name, options):
    if options and name in ("sft_loss", "value_loss"):
        options = {}
    view = random_view(0)
    with cuda_without_device() as counted:
        columns = {
            field.name: torch.empty(
                value.shape, dtype=torch.float32 if value.is_floating_point() else value.dtype, device=CUDA
            )
            for field in dataclasses.fields(view)
            if isinstance(value := getattr(view, field.name), torch.Tensor)
        }
        on_device = dataclasses.replace(view, **columns)
        loss, metrics = LOSSES[name](on_device, torch.empty(len(view.loss_mask), device=CUDA), **options)
    assert (loss.device.type, loss.shape) == ("cuda", ())
    assert all(value.device.type == "cuda" and value.shape == () for value in metrics.values())
    assert len(counted.waits) == WAITS.get(name, 0), counted.waits
