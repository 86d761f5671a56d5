"""Fields of `/generate`: what asks for something that is not given is refused, and what asks for nothing is taken."""

from __future__ import annotations

import asyncio

import pytest
from slime_compat.engine.requests import answer
from slime_core.errors import DataError
from slime_core.protocols import Completion
from slime_core.testing.tabular import LetterTokenizer


class SaysHi:
    """Answers each request alike."""

    async def generate(self, tokens, params, *, session_id=None):
        return Completion(tokens=TOKENS, log_probs=[-1.0, -2.0], finish_reason="length", weight_version="3")


TOKENIZER = LetterTokenizer()
TOKENS = TOKENIZER.encode("hi")


@pytest.mark.parametrize(
    "asked",
    [
        {"return_hidden_states": True},
        {"logprob_start_len": 0},
        {"logprob_start_len": 7},
        {"session_params": {"id": "a"}},
        {"routed_experts_start_len": 5},
        {"top_logprobs_num": 2},
    ],
)
def test_what_a_request_would_not_get_is_refused_by_name(asked):
    with pytest.raises(DataError, match=rf"/generate: found the fields {next(iter(asked))}; wanted "):
        asyncio.run(answer({"input_ids": [1], "return_logprob": True, **asked}, SaysHi(), TOKENIZER))


@pytest.mark.parametrize(
    "asked",
    [
        {"return_hidden_states": False},
        {"logprob_start_len": -1},
        {"logprob_start_len": 0, "return_logprob": False},
        {"session_params": None},
        {"routed_experts_start_len": 0},
    ],
)
def test_what_asks_for_nothing_is_taken(asked):
    found = asyncio.run(answer({"input_ids": [1], "return_logprob": True, **asked}, SaysHi(), TOKENIZER))
    assert found["text"] == "hi"


def test_log_probs_have_texts_where_they_are_asked_for():
    asked = {"input_ids": [1], "return_logprob": True}
    plain = asyncio.run(answer(asked, SaysHi(), TOKENIZER))
    texts = asyncio.run(answer({**asked, "return_text_in_logprobs": True}, SaysHi(), TOKENIZER))
    assert plain["meta_info"]["output_token_logprobs"] == [[-1.0, TOKENS[0], None], [-2.0, TOKENS[1], None]]
    assert texts["meta_info"]["output_token_logprobs"] == [[-1.0, TOKENS[0], "h"], [-2.0, TOKENS[1], "i"]]
