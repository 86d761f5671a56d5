"""What may stand behind a number."""

import time

import pytest
from slime_core.samples import Sample
from slime_rm.math.dapo import dapo
from slime_rm.math.gsm8k import gsm8k
from slime_rm.math.math_verify import math_verify
from slime_rm.math.number_text import leaves_number

LIMIT_S = 5.0
"""Wide: each of them takes some milliseconds."""
REPEATED = (
    "a'",
    "a-",
    "a/",
    "a ",
    "^2",
    "1,",
    "5 or ",
    "\\text{",
    "\\(",
    "$",
    "**",
    "between 5 and ",
    "...",
    "°",
)


@pytest.mark.parametrize("piece", REPEATED)
def test_a_long_tail_behind_the_number_is_graded_in_time(piece):
    began = time.process_time()
    for n in (200, 5000, 100_000 // len(piece)):
        gsm8k(Sample(response=f"#### 5 {piece * n}!", label="5"))
        gsm8k(Sample(response=f"so 5 {piece * n}!", label="5"), method="flexible")
        dapo(Sample(response=f"Answer: 5 {piece * n}!", label="5"), window_characters=200_000)
        math_verify(Sample(response=f"The answer is 5 {piece * n}!", label="5"))
    assert time.process_time() - began < LIMIT_S


@pytest.mark.parametrize(
    "words", [" apples", " km/h", " miles per hour", " red marbles left", "cm^2", " m²", " in total"]
)
def test_units_and_counted_things_leave_a_number(words):
    assert leaves_number(words)


@pytest.mark.parametrize(
    "words", [" doubled", "th", "...", " scratch that", " at most", " before taxes", " apples or so"]
)
def test_other_words_do_not_leave_a_number(words):
    assert not leaves_number(words)
