"""`slime bench async`: every loop does the same number of samples, none older than it may be."""

from __future__ import annotations

import json

import pytest
from slime_bench.asynchronous import LOOPS, asynchronous


def test_each_loop_trains_on_as_many_samples_none_older_than_it_may_be(capsys):
    words = ["--steps", "4", "--prompts", "4", "--samples", "2", "--slots", "4", "--median-ms", "1"]
    assert asynchronous([*words, "--max-staleness", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {each["loop"]: each for each in result["loops"]}
    assert list(found) == list(LOOPS)
    for each in found.values():
        assert each["samples_per_s"] * each["wall_s"] == pytest.approx(4 * 4 * 2)
        assert 0 < each["of_ideal"] <= 1
    assert found["sync"]["staleness"] == 0
    assert found["one-step-off"]["staleness"] == 0.75  # the first of four steps is not
    assert 0 < found["fully-async"]["staleness"] <= 2
