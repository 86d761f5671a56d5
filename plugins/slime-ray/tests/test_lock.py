"""What a process of the cluster checks before it builds its part of the run."""

from __future__ import annotations

import re

import pytest
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry
from slime_ray.process.lock import check_lock


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def lock(registry: Registry) -> list[dict[str, str]]:
    """That of a driver which has resolved the launcher, and a function of a user's own."""
    registry.find("slime.launchers", "ray")
    registry.find("slime.rewards", "mine:score")
    return registry.lock()


def test_the_same_plugins_are_accepted(registry, lock):
    assert {plugin["name"] for plugin in lock} > {"ray", "mine:score"}
    check_lock(Registry(), lock)


def test_another_version_is_refused_with_both(lock):
    (ray,) = (plugin for plugin in lock if plugin["group"] == "slime.launchers")
    ray["version"] = "99.0"
    with pytest.raises(
        PluginError, match=r"'ray' is slime-ray 0\.1\.0 on .+ and slime-ray 99\.0 where the run"
    ):
        check_lock(Registry(), lock)


def test_a_plugin_that_is_not_installed_here_is_named(lock):
    alone = Registry(allow=["slime-core"])
    hooks = [plugin for plugin in lock if plugin["distribution"] == "slime-ray"]
    with pytest.raises(PluginError, match=re.escape("'ray' is not there on ")):
        check_lock(alone, hooks)
