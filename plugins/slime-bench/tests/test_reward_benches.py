"""`slime bench rewards` and `slime bench graders`, at a size that shows that they count right."""

import json
from fractions import Fraction

import pytest
from slime_bench.graders import graders
from slime_bench.rewards import rewards, samples, trapped
from slime_core.errors import DataError

pytestmark = pytest.mark.timeout(600)


def test_of_the_responses_three_quarters_are_right():
    made = samples(40, seed=0)

    def value(text):
        numerator, denominator = text.split(r"\frac{")[1].split("}{")
        return Fraction(int(numerator), int(denominator.split("}")[0]))

    right = [value(sample.response) == value(sample.label) for sample in made]
    assert sum(right) == 30
    assert samples(40, seed=0) == made != samples(40, seed=1)


def test_a_share_of_the_responses_misbehaves_in_every_way_in_turn():
    bad = trapped(samples(300, seed=0), share=0.02, seed=0)
    kinds = [sample.metadata["trap"].kind for sample in bad if "trap" in sample.metadata]
    assert sorted(kinds) == ["crash", "crash", "hang", "hang", "memory", "memory"]
    assert [sample.index for sample in bad] == list(range(300))


def test_every_response_is_accounted_for(capfd):
    words = ["--responses", "60", "--bad", "0.05", "--workers", "2", "--timeout-s", "5", "--reward", "exact"]
    assert rewards([*words, "--repeats", "2"]) == 0
    shown = capfd.readouterr().out
    assert "114 results, 6 failures" in shown
    assert "pool / inline " in shown
    assert "0 others failed; 0 processes left behind" in shown


def cases(tmp_path, *rows):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_grader_that_differs_from_its_verdict_is_shown_and_fails(tmp_path, capsys):
    row = {"grader": "exact", "kind": "k", "label": "a", "response": "a", "verdict": 1.0}
    assert graders([cases(tmp_path, row), "--peer", "math-verify"]) == 0
    assert (
        graders([cases(tmp_path, row, row | {"verdict": 0.0}), "--peer", "math-verify", "--show", "5"]) == 1
    )
    assert "slime exact: 1, decided 0: label 'a', response 'a' (k)" in capsys.readouterr().out


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cases\.jsonl:1: found the keys"):
        graders([cases(tmp_path, {"grader": "exact"})])
    with pytest.raises(DataError, match="found nothing"):
        graders([str(tmp_path / "none.jsonl")])
