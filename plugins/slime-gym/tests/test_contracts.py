"""Our own source and reward keep the promises of their kinds."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from slime_core.plugins.registry import Registry
from slime_core.samples import Sample
from slime_core.testing import contracts
from slime_gym.problems import training_problems
from slime_gym.reward import gym
from slime_gym.source import create_source

from .test_source import Build, sums


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-gym"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


def test_the_source_keeps_its_promises():
    contracts.check_source(lambda: create_source(Build(sums())), n_samples_per_prompt=3)


def test_the_reward_keeps_its_promises():
    problem = training_problems(sums())[0]
    metadata = json.loads(json.dumps({"gym": asdict(problem.origin)}))
    samples = [
        Sample(index=0, label=problem.answer, response=text, metadata=metadata)
        for text in (problem.answer, "")
    ]
    contracts.check_reward(gym, samples)
