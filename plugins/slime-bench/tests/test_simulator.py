"""`slime bench simulator`: what was run is what is predicted, and the costs come from the folders of other runs."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from slime_bench.simulator.command import simulator
from slime_bench.simulator.comparison import Compared, compare, typical_of
from slime_bench.simulator.computing import FITTED, MODEL, PREDICTED, words_of
from slime_bench.simulator.waiting import CONFIGURATIONS, REAL, TRACE, run_really, settings_of
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry


def test_a_prediction_stands_beside_each_run(capsys):
    simulator(["--steps", "2", "--only", "2", "--json"])  # its exit status is a matter of time
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["configurations"]] == list(CONFIGURATIONS)[:2]
    assert [each["is_fitted"] for each in found["configurations"]] == [True, False]
    for each in found["configurations"]:
        assert each["error"] == pytest.approx(each["simulated_s"] / each["real_s"] - 1)
        assert each["real_staleness"] == each["simulated_staleness"] == 0


def test_twelve_configurations_are_predicted_and_each_has_flags_that_are_settings():
    registry = Registry.from_environment()
    assert len(CONFIGURATIONS) == 13
    loops = {settings_of(name, registry, steps=3).run.loop for name in CONFIGURATIONS}
    assert loops == {"sync", "one-step-off", "fully-async"}


def test_a_prediction_is_the_same_whatever_times_were_measured(tmp_path):
    """All times of the run are made twice as long."""
    registry, name = Registry.from_environment(), list(CONFIGURATIONS)[1]
    run_really(settings_of(name, registry, steps=2), tmp_path)
    given = {"costs": REAL, "trace": TRACE, "registry": registry, "is_fitted": False}
    before = compare(name, tmp_path, **given)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    longer = [
        {key: 2 * value if key.startswith("perf/") else value for key, value in row.items()} for row in rows
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in longer))
    after = compare(name, tmp_path, **given)
    assert (after.real_s, after.simulated_s) == (pytest.approx(2 * before.real_s), before.simulated_s)


def test_of_several_runs_the_medians_are_compared():
    times = [(1.0, 1.1, 0.5), (4.0, 1.2, 0.75), (2.0, 1.5, 0.25)]
    found = typical_of(
        [
            Compared(
                name="x",
                real_s=real,
                simulated_s=simulated,
                real_staleness=old,
                simulated_staleness=old,
                is_fitted=False,
            )
            for real, simulated, old in times
        ]
    )
    assert (found.real_s, found.simulated_s, found.real_staleness) == (2.0, 1.2, 0.5)
    assert found.error == pytest.approx(-0.4)


def test_twelve_configurations_that_compute_are_none_of_those_that_costs_come_from(tmp_path):
    registry = Registry.from_environment()
    assert len(set(PREDICTED) - set(FITTED)) == 12
    loops = [
        load_settings([], words_of(tmp_path, each, "x", steps=2), registry=registry).run.loop
        for each in PREDICTED
    ]
    assert Counter(loops) == {"sync": 4, "one-step-off": 3, "fully-async": 5}


@pytest.mark.faults
@pytest.mark.slow
def test_runs_of_an_engine_and_a_trainer_that_compute_are_predicted(capsys, monkeypatch, tmp_path):
    """Of a smaller model than the command's own, for how near the times come is not asked here."""
    for name, size in {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}.items():
        monkeypatch.setitem(MODEL, name, size)
    simulator(
        [
            "--real",
            "--steps",
            "4",
            "--only",
            "1",
            "--repeats",
            "2",
            "--keep",
            str(tmp_path / "runs"),
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [each["is_fitted"] for each in found["configurations"]] == [True, True, True, False]
    for each in found["configurations"]:
        assert each["simulated_s"] > 0
        assert each["real_staleness"] == each["simulated_staleness"]
    assert found["fitted"]["engine"]["shares_prompts"] is found["fitted"]["trainer"]["shares_prompts"] is True
    assert min(found["fitted"]["slowdown"].values()) >= 1
    with pytest.raises(ConfigError, match="wanted a new folder"):
        simulator(["--real", "--keep", str(tmp_path / "runs")])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--real", "--steps", "3"], "--steps: found 3; wanted at least 4"),
        (["--only", "0"], "--only: found 0; wanted at least 1"),
        (["--keep", "somewhere"], "wanted --real with it"),
        (["--repeats", "2"], "--repeats: found 2; wanted --real with it"),
        (["--real", "--repeats", "0"], "--repeats: found 0; wanted at least 1"),
    ],
)
def test_what_the_command_cannot_do_is_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        simulator(words)
