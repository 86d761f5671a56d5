"""The reward `gpqa`."""

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
