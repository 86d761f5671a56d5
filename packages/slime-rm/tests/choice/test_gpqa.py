"""The reward `gpqa`."""

from itertools import permutations

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.choice.gpqa import gpqa


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"choices": "ABCD"}, r"metadata\['choices'\] is 'ABCD'; wanted a list"),
        ({"choices": ["x", "y"], "correct_letter": "C"}, "the correct letter is 'C'; wanted one of AB"),
        ({"valid_letters": ["1", "2"]}, "wanted letters"),
    ],
)
def test_gpqa_refuses_metadata_that_cannot_be(metadata, words):
    with pytest.raises(SampleError, match=f"^sample 4: .*{words}"):
        gpqa(Sample(index=4, response="A", label="A", metadata=metadata))


TEXTS = ("the mitochondrion", "Paris", "CH3OH", "hydrogen bonding", "10 m/s")
JOINTS = (
    ", ",
    " ",
    "; ",
    " and ",
    " or ",
    " / ",
    "\n",
    "\n\n",
    ". ",
    " is ",
    " = ",
    " because ",
    ", not ",
    " because the answer is ",
)
FORMS = (
    "{}", "The answer is {}.", r"\boxed{{{}}}", "Answer: {}", "**{}**", "The answer is ({}).", "{} is correct.", "One of: {}",
    "<answer>{}</answer>", r"\boxed{{London}} {}",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_where_options_are_not_known_no_response_is_right_for_two_texts(form):
    responses = [
        form.format(joint.join(texts))
        for joint in JOINTS
        for texts in [*permutations(TEXTS, 2), TEXTS, TEXTS[::-1]]
    ]
    found = {r: [t for t in TEXTS if gpqa(Sample(response=r, label=t)).score] for r in responses}
    assert {response: texts for response, texts in found.items() if len(texts) > 1} == {}


def test_where_options_are_not_known_a_refused_list_says_what_would_tell():
    grade = gpqa(Sample(response="Paris, London", label="Paris"))
    assert (grade.score, grade.details["answer"]) == (0.0, None)
    assert "metadata['choices']" in grade.details["why"]
    metadata = {"choices": ["Paris", "Rome"]}
    assert gpqa(Sample(response="Paris, London", label="Paris", metadata=metadata)).score == 1.0
