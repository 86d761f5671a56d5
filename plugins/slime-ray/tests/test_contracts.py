"""Our own plugins keep the promises of their kinds, the launcher over a cluster of its own."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts
from slime_ray.launcher import launch


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-ray"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


@pytest.mark.faults
@pytest.mark.slow
def test_the_launcher_keeps_its_promises():
    contracts.check_launcher(launch, "--launcher", "ray")
