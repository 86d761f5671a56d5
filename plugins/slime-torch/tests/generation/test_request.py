"""When a response ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from slime_core.protocols import SamplingParams
from slime_torch.generation.request import StopRule


def length_and_reason(text: str | list[int], tokenizer, **params) -> tuple[int, str | None]:
    """Feed ids one by one, as the engine does."""
    rule = StopRule(SamplingParams(**{"max_new_tokens": 1000} | params), tokenizer)
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    for n in range(1, len(ids) + 1):
        reason = rule.reason(ids[:n])
        if reason is not None:
            return n, reason
    return len(ids), None


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(tokenizer):
    assert length_and_reason("abc###def", tokenizer, stop=("###",)) == (6, "stop")


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    assert length_and_reason("one two three", tokenizer, stop=("three", "two")) == (7, "stop")


def test_a_stop_string_may_be_spelled_in_several_bytes_a_character(tokenizer):
    assert length_and_reason("x→→y", tokenizer, stop=("→→",)) == (7, "stop")


def test_a_stop_string_before_min_new_tokens_does_not_count(tokenizer):
    assert length_and_reason("a##bcdefgh##i", tokenizer, stop=("##",), min_new_tokens=4) == (12, "stop")


def test_an_early_stop_string_that_is_still_in_the_tail_does_not_count(tokenizer):
    assert length_and_reason("##a#b", tokenizer, stop=("##",), min_new_tokens=4) == (5, None)


def test_overlapping_repeats_complete_a_stop_string(tokenizer):
    assert length_and_reason("####", tokenizer, stop=("##",), min_new_tokens=4) == (4, "stop")


def test_a_stop_string_far_into_a_long_response_is_found(tokenizer):
    assert length_and_reason("word " * 100 + "END more", tokenizer, stop=("END",)) == (503, "stop")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_break_a_stop_string_only_when_they_are_text(tokenizer, skip):
    ids = [*b"a#", 290, *b"#b"]
    wanted = (4, "stop") if skip else (5, None)
    assert length_and_reason(ids, tokenizer, stop=("##",), skip_special_tokens=skip) == wanted


def test_the_end_of_sequence_id_ends_the_response_and_stays_in_it(tokenizer):
    assert length_and_reason([65, 300, 66], tokenizer) == (2, "stop")


def test_stop_token_ids_end_the_response(tokenizer):
    assert length_and_reason([65, 66, 67], tokenizer, stop_token_ids=(66,)) == (2, "stop")


def test_ids_before_min_new_tokens_do_not_count(tokenizer):
    assert length_and_reason([300, 65, 300, 66], tokenizer, min_new_tokens=3) == (3, "stop")


def test_the_limit_ends_the_response_by_length(tokenizer):
    assert length_and_reason("abcdef", tokenizer, max_new_tokens=4) == (4, "length")


def test_a_stop_at_the_limit_is_a_stop(tokenizer):
    assert length_and_reason([65, 300], tokenizer, max_new_tokens=2) == (2, "stop")


def test_a_response_ends_at_the_ids_that_the_models_folder_names():
    tokenizer = SimpleNamespace(eos_token_id=0, eos_token_ids={7, 9})
    rule = StopRule(SamplingParams(max_new_tokens=10, stop_token_ids=(11,)), tokenizer)
    assert [rule.reason([1, last]) for last in (0, 7, 8, 9, 11)] == ["stop", "stop", None, "stop", "stop"]
