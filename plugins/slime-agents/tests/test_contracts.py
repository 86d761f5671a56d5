"""Our own plugins keep the promises of their kinds."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-agents"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)
