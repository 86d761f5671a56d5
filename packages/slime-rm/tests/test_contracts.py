"""Our own rewards keep the promises of their kind, on samples that they are made for."""

from __future__ import annotations

import json

import pytest
from slime_core.plugins.registry import Registry
from slime_core.samples import Sample
from slime_core.testing import contracts
from slime_rm.remote.remote_rm import RemoteReward


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-rm"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


LETTER = Sample(response="The answer is B.", label="B", metadata={"choices": ["x", "y", "z"]})
BOXED = Sample(response="\\boxed{B}", label="B", metadata={"choices": ["x", "y", "z"]})
#: Rewards that score nothing but samples of their own form.
PARTICULAR = {
    "boxed_gpqa": BOXED,
    "boxed_multiple_choice": BOXED,
    "code": Sample(
        response="```python\nprint(4)\n```", label=json.dumps({"inputs": ["2"], "outputs": ["4"]})
    ),
    "gpqa": LETTER,
    "ifbench": Sample(
        response="one two three",
        metadata={
            "instruction_id_list": ["count:word_count_range"],
            "kwargs": [{"min_words": 2, "max_words": 3}],
        },
    ),
    "multiple_choice": LETTER,
}


@pytest.mark.parametrize("name", PARTICULAR)
def test_rewards_for_particular_samples_keep_their_promises(name):
    contracts.check_reward(Registry().resolve("slime.rewards", name), [PARTICULAR[name]])


def test_a_reward_that_asks_a_server_keeps_its_promises(server):
    contracts.check_reward(RemoteReward, options={"rm_url": server.url})
