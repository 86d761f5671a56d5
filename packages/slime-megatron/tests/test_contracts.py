"""Our own trainer keeps the promises of its kind."""

from __future__ import annotations

import dataclasses

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts

from .algorithms import policy_gradient
from .batches import make_batch
from .test_trainer import make_trainer


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-megatron"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


def test_the_trainer_keeps_its_promises(qwen3, tmp_path):
    contracts.check_trainer(lambda: make_trainer(qwen3[1]), tmp_path, batch=make_batch())


def test_an_estimator_that_writes_into_its_columns_does_not_write_into_the_batch(qwen3, tmp_path):
    def centred(view):
        for column in (view.rewards, view.weights, view.loss_mask, view.rollout_log_probs):
            column -= column.mean()
        return view.rewards[view.sample_of_token], view.rewards[view.sample_of_token]

    algorithm = dataclasses.replace(policy_gradient(), estimator=centred)
    contracts.check_trainer(lambda: make_trainer(qwen3[1], algorithm=algorithm), tmp_path, batch=make_batch())
