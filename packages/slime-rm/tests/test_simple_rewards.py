"""The rewards `exact` and `random`."""

import pytest
from slime_core.errors import SampleError
from slime_core.sample import Sample
from slime_rm.chance import random
from slime_rm.exact import exact


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("yes", "yes", 1.0),
        (" yes\n", "yes ", 1.0),
        ("Yes", "yes", 0.0),
        ("yes.", "yes", 0.0),
        ("", "yes", 0.0),
    ],
)
def test_exact_compares_text_but_for_outer_blanks(response, label, score):
    assert exact(Sample(response=response, label=label)) == score


def test_exact_without_label_names_the_sample():
    with pytest.raises(SampleError, match="sample 4: label is None"):
        exact(Sample(index=4, response=""))


def test_random_is_the_same_for_the_same_sample_and_seed():
    scores = [random(Sample(index=i), seed=3) for i in range(100)]
    assert scores == [random(Sample(index=i, response="x"), seed=3) for i in range(100)]
    assert scores != [random(Sample(index=i), seed=4) for i in range(100)]


def test_random_is_zero_or_one_about_equally_often():
    scores = [random(Sample(index=i)) for i in range(2000)]
    assert set(scores) == {0.0, 1.0}
    assert abs(sum(scores) - 1000) < 4 * (2000 * 0.25) ** 0.5  # four standard deviations
