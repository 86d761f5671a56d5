"""`slime bench rewards`, at a size that shows that it counts right."""

from fractions import Fraction

import pytest
from slime_bench.rewards.command import rewards, samples, trapped

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


@pytest.mark.faults
def test_every_response_is_accounted_for(capfd):
    words = ["--responses", "60", "--bad", "0.05", "--workers", "2", "--timeout-s", "5", "--reward", "exact"]
    assert rewards([*words, "--repeats", "2"]) == 0
    shown = capfd.readouterr().out
    assert "114 results, 6 failures" in shown
    assert "pool / inline " in shown
    assert "0 others failed; 0 processes left behind" in shown
