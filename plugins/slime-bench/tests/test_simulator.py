"""`slime bench simulator`: what was run is what is predicted, and the costs come from the first run's folder."""

from __future__ import annotations

import json

import pytest
from slime_bench.simulator import CONFIGURATIONS, settings_of, simulator
from slime_core.plugins.registry import Registry


def test_a_prediction_stands_beside_each_run(capsys):
    simulator(["--steps", "2", "--only", "2", "--json"])  # its exit status is a matter of time
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["configurations"]] == list(CONFIGURATIONS)[:2]
    for each in found["configurations"]:
        assert each["error"] == pytest.approx(each["simulated_s"] / each["real_s"] - 1)
        assert each["real_staleness"] == each["simulated_staleness"] == 0


def test_twelve_configurations_are_predicted_and_each_has_flags_that_are_settings():
    registry = Registry.from_environment()
    assert len(CONFIGURATIONS) == 13
    loops = {settings_of(name, registry, steps=3).run.loop for name in CONFIGURATIONS}
    assert loops == {"sync", "one-step-off", "fully-async"}
