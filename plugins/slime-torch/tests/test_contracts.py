"""Our own engine keeps the promises of its kind."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts

from .generation.test_update import Sender, in_buckets


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-torch"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_engine_keeps_its_promises(tiny, kind):
    sender = Sender(*in_buckets(tiny(kind, seed=1).tensors()))
    contracts.check_engine(tiny(kind).engine, send=sender.send)
