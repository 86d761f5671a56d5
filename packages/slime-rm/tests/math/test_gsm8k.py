"""The reward `gsm8k`."""

import pytest
from slime_core.samples import Sample
from slime_rm.math.gsm8k import gsm8k


def test_unknown_method_of_gsm8k_is_an_error():
    with pytest.raises(ValueError, match="method is 'strcit'"):
        gsm8k(Sample(response="", label="1"), method="strcit")


def test_gsm8k_gives_the_format_score_to_a_wrong_number_in_the_right_form():
    grades = [gsm8k(Sample(response=r, label="72"), format_score=0.1) for r in ("#### 72", "#### 71", "71")]
    assert [(grade.score, dict(grade.parts).get("acc")) for grade in grades] == [
        (1.0, 1.0),
        (0.1, 0.0),
        (0.0, None),
    ]
