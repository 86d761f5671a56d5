"""Special tokens at the end of a response."""

import pytest
from slime_core.rewards.ending import up_to_special_tokens, without_special_tokens


@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|endoftext|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
        "<eos>",
        "<end_of_turn>",
        "<turn|>",
        "[PAD]",
    ],
)
def test_special_tokens_at_the_end_go_and_others_stay(token):
    assert without_special_tokens(f"a {token} b{token}\n{token} ") == f"a {token} b"


@pytest.mark.parametrize("text", ["<b>a</b>", "<s>a</s>", "a < b > c", "|a|", "x <y>", ""])
def test_what_is_no_special_token_stays(text):
    assert without_special_tokens(text) == text


def test_blanks_at_the_end_stay_where_no_special_token_is():
    assert up_to_special_tokens("so 4 \n") == "so 4 \n"
    assert up_to_special_tokens("so 4 \n<|im_end|>\n") == "so 4"
