"""The reward `exact`."""

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.text.exact import exact


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("yes", "yes", 1.0),
        (" yes\n", "yes ", 1.0),
        ("Yes", "yes", 0.0),
        ("yes.", "yes", 0.0),
        ("", "yes", 0.0),
        ("<think>no, or\nyes</think>\n\nyes", "yes", 1.0),
        ("yes</think>no<|im_end|>", "no", 1.0),
        ("<think>yes</think>no", "yes", 0.0),
        ("<think>yes", "yes", 0.0),
        ("<think>yes</think>no", "<think>yes</think>no", 1.0),
    ],
)
def test_exact_compares_text_but_for_outer_blanks(response, label, score):
    assert exact(Sample(response=response, label=label)) == score


def test_exact_without_label_names_the_sample():
    with pytest.raises(SampleError, match="sample 4: label is None"):
        exact(Sample(index=4, response=""))
