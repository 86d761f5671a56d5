"""The reward `math_verify`."""

import threading

from slime_core.samples import Sample
from slime_rm.math.math_verify import math_verify


def test_math_verify_grades_in_a_thread():
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(
            math_verify(Sample(response=response, label=r"\frac{1}{2}")).score
            for response in ("$0.5$", "$0.6$")
        )
    )
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


def test_math_verify_reads_the_end_of_the_response_only():
    assert math_verify(Sample(response="$5$" + " " * 3000, label="5")).score == 0.0
