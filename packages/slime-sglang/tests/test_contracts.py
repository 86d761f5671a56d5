"""Our own plugins keep the promises of their kinds, the engine over a real server."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts

from .sender import Sender


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-sglang"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_the_engine_keeps_its_promises(new_engine, model_path, tiny_llama, tmp_path):
    sender = Sender({name: parameter.detach() for name, parameter in tiny_llama(1).named_parameters()})
    contracts.check_engine(
        lambda: new_engine(model_path, tmp_path, staging_dir=tmp_path),
        send=sender.send,
        heeds_seeds=False,  # SGLang does under --sglang-enable-deterministic-inference, which it lacks on a CPU
    )
