"""Our own trainer keeps the promises of its kind."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts

from .conftest import make_batch
from .test_trainer import make_trainer


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-megatron"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


def test_the_trainer_keeps_its_promises(qwen3, tmp_path):
    contracts.check_trainer(lambda: make_trainer(qwen3[1]), tmp_path, batch=make_batch())
