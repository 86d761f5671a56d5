"""The example reward, and the page that quotes it."""

from pathlib import Path

import pytest
from slime_core.samples import Sample
from slime_core.testing.contracts import check_reward
from slime_example_reward import ends_with_label

PACKAGE = Path(__file__).parents[1]
PAGE = (PACKAGE.parents[1] / "docs" / "write-a-plugin.md").read_text()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so it is 42", 1.0),
        ("42\n", 1.0),
        ("42<|im_end|>\n", 1.0),
        ("42.", 0.0),
        ("42.<|im_end|>", 0.0),
        ("", 0.0),
        ("4 2", 0.0),
    ],
)
def test_score_says_whether_the_response_ends_with_the_label(response, score):
    assert ends_with_label(Sample(response=response, label="42")) == score


def test_it_keeps_the_promises_of_a_reward():
    check_reward(ends_with_label)


@pytest.mark.parametrize("label", [None, ""])
def test_missing_label_raises(label):
    with pytest.raises(ValueError, match="no label"):
        ends_with_label(Sample(response="42", label=label))


@pytest.mark.parametrize(
    ("language", "file"), [("python", "src/slime_example_reward/__init__.py"), ("toml", "pyproject.toml")]
)
def test_page_quotes_the_package_word_for_word(language, file):
    assert f"```{language}\n{(PACKAGE / file).read_text()}```\n" in PAGE


def test_example_is_eleven_lines():
    assert len((PACKAGE / "src/slime_example_reward/__init__.py").read_text().splitlines()) == 11
