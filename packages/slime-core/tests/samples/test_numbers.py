"""`check_numbers`: the numbers of several samples at once."""

from __future__ import annotations

import numpy as np
import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_core.samples.compact import FLOAT32, IDS, Compact
from slime_core.samples.validation import LOG_PROB_SLACK, MAX_ID, check_numbers


def finished(index, ids, log_probs) -> Sample:
    sample = Sample(index=index, group_index=0, tokens=[5, 6])
    sample.append_response(
        Compact(IDS, ids), log_probs=Compact(FLOAT32, np.float32(log_probs)), finish_reason="stop"
    )
    return sample


def good(index) -> Sample:
    return finished(index, [7, 8], [-0.5, 0.0])


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("ids", "log_probs", "what"),
    [
        ([7, 9], [-0.5, -0.5], r"tokens\[3\] is 9 .*from 0 to 8"),
        ([-1, 7], [-0.5, -0.5], r"tokens\[2\] is -1"),
        ([7, 8], [-0.5, float("nan")], r"rollout_log_probs\[1\] is nan"),
        ([7, 8], [float("-inf"), -0.5], r"rollout_log_probs\[0\] is -inf"),
        ([7, 8], [-0.5, 2 * LOG_PROB_SLACK], r"rollout_log_probs\[1\] is 0.0"),
    ],
)
def test_one_bad_number_among_the_samples_of_a_group_is_named(ids, log_probs, what, at):
    group = [good(0), good(1), good(2)]
    group[at] = finished(at, ids, log_probs)
    with pytest.raises(SampleError, match=rf"^sample {at}: {what}"):
        check_numbers(group, vocab_size=9)


def test_numbers_at_their_bounds_are_accepted():
    check_numbers([good(0), finished(1, [0, 8], [-1e30, LOG_PROB_SLACK / 2])], vocab_size=9)
    check_numbers([finished(0, [MAX_ID], [0.0])])
    check_numbers([])
    check_numbers([Sample(index=0, tokens=[5])])
