"""`slime bench controller`, at a size that shows that it counts right."""

from __future__ import annotations

import json

import pytest
from slime_bench.controller import balance
from slime_bench.controller.command import controller, exponent
from slime_bench.controller.events import events

pytestmark = pytest.mark.timeout(600)
SMALL = [
    "--prompts",
    "4",
    "--samples",
    "4",
    "--tokens",
    "20",
    "--optimizer-steps",
    "2",
    "--ranks",
    "2",
    "--ragged",
    "200",
]


@pytest.mark.faults
def test_every_stage_is_timed_and_memory_is_that_of_the_arrays(capsys):
    assert controller([*SMALL, "--growth", "16", "32", "--growth-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["stages"]["wall_s"]) == [
        "take", "generate", "reward", "filter", "metrics", "record", "batch", "schedule",
    ]  # fmt: skip
    assert all(
        each["first_cpu_s"].keys() == each["cpu_s"].keys() for each in (result["stages"], result["whole"])
    )
    # 16 samples of 14 prompt tokens and 20 more: ids and log-probs twice, mask and weights once, 4 bytes each.
    assert result["stages"]["raw_bytes"] == 16 * 4 * (2 * (34 + 20) + 20 + 20)
    assert list(result["growth"]["seconds"]) == ["16", "32"]
    assert [share["name"] for share in result["divisions"]][:2] == [
        "slime: schedule of micro-batches", "slime: samples, as many for each rank",
    ]  # fmt: skip


def test_events_cost_something_and_the_rate_at_which_that_matters_follows(capsys):
    assert events(["--prompts", "4", "--samples", "4", "--tokens", "8", "--turns", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["turns"]) == (16, 2)
    assert result["without_us"] > 0
    if result["events_us"] > 0:
        rate = result["samples_per_s_at_half_a_percent"]
        assert rate * result["events_us"] == pytest.approx(5000)  # half a percent of a second's microseconds


def test_the_exponent_of_quadratic_times_is_two():
    assert exponent([(10, 3.0), (20, 12.0), (40, 48.0)]) == pytest.approx(2.0)
    assert exponent([(10, 3.0)]) is None


def test_ragged_lengths_are_within_limits_and_drawn_anew_alike():
    lengths = balance.ragged_lengths(1000)
    assert 1 <= lengths.min() < lengths.max() <= 8176
    assert (lengths == balance.ragged_lengths(1000)).all()


def test_ours_is_within_a_hundredth_of_the_bound():
    assert all(
        share.over_bound < 0.01 for share in balance.divisions(6400, 64) if share.name.startswith("slime")
    )
