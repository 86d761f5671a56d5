"""Our own trackers keep the promises of their kind, over a whole run."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts
from slime_trackers import mlflow, swanlab, tensorboard, wandb


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-trackers"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


def test_trackers_are_told_of_a_whole_run(tmp_path):
    contracts.check_tracker(mlflow.create_tracker, "--mlflow-tracking-uri", (tmp_path / "mlflow").as_uri())
    contracts.check_tracker(swanlab.create_tracker, "--swanlab-mode", "disabled")
    contracts.check_tracker(tensorboard.create_tracker)
    contracts.check_tracker(wandb.create_tracker, "--wandb-mode", "disabled")
