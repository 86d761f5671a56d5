"""The reward `random`."""

from slime_core.samples import Sample
from slime_rm.text.random_score import random


def test_random_is_the_same_for_the_same_sample_and_seed():
    scores = [random(Sample(index=i), seed=3) for i in range(100)]
    assert scores == [random(Sample(index=i, response="x"), seed=3) for i in range(100)]
    assert scores != [random(Sample(index=i), seed=4) for i in range(100)]


def test_random_is_zero_or_one_about_equally_often():
    scores = [random(Sample(index=i)) for i in range(2000)]
    assert set(scores) == {0.0, 1.0}
    assert abs(sum(scores) - 1000) < 4 * (2000 * 0.25) ** 0.5  # four standard deviations
