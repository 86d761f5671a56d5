"""Labels that are missing or of another kind, whatever the reward."""

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.boxed_forms import boxed_f1, boxed_gpqa
from slime_rm.choice.gpqa import gpqa
from slime_rm.choice.multiple_choice import multiple_choice
from slime_rm.math.dapo import dapo
from slime_rm.math.deepscaler import deepscaler
from slime_rm.math.gsm8k import gsm8k
from slime_rm.math.math_verify import math_verify
from slime_rm.text.f1 import f1


@pytest.mark.parametrize(
    "grader", [dapo, deepscaler, f1, gsm8k, math_verify, multiple_choice, boxed_f1], ids=lambda g: g.__name__
)
@pytest.mark.parametrize("label", [None, "", "  "])
def test_missing_label_is_an_error_that_names_the_sample(grader, label):
    with pytest.raises(SampleError, match=r"^sample 4: label is "):
        grader(Sample(index=4, response="", label=label))


@pytest.mark.parametrize(
    ("grader", "label", "words"),
    [
        (gsm8k, "seventy", "wanted a number"),
        (gsm8k, "1,00", "wanted a number"),
        (multiple_choice, "AB", "wanted the letter of an option, one of ABCDEFGHIJ"),
        (multiple_choice, "Z", "wanted the letter of an option, one of ABCDEFGHIJ"),
        (math_verify, "???", "wanted mathematics"),
        (gpqa, None, "neither correct_letter nor correct_answer"),
        (boxed_gpqa, "", "neither correct_letter nor correct_answer"),
    ],
)
def test_label_of_another_kind_is_an_error_that_names_the_sample(grader, label, words):
    with pytest.raises(SampleError, match=rf"^sample 4: .*{words}"):
        grader(Sample(index=4, response="Answer: 5", label=label))
