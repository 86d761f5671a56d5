"""`ctx.turn` and `ctx.append`: every per-token field of a conversation, worked out by hand."""

import asyncio

import numpy as np
import pytest
from slime_core.errors import SampleError
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.protocols.turn import text_after, text_to_stop
from slime_core.samples import Sample, Status
from slime_core.samples.versions import version_spans

from ..byte_tokenizer import ByteTokenizer, PieceTokenizer


class Scripted:
    """Answers with the given completions in turn, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def generate(self, tokens, params, *, session_id=None):
        self.asked.append((bytes(tokens), params.max_new_tokens))
        return self.answers.pop(0)


def said(text, *, reason="stop", version="3", p=-0.5, **metadata):
    tokens = list(text)
    return Completion(
        tokens=tokens,
        log_probs=[p] * len(tokens),
        finish_reason=reason,
        weight_version=version,
        metadata=metadata,
    )


def context(*answers, **fields):
    return GenerateContext(engine=Scripted(*answers), tokenizer=ByteTokenizer(), **fields)


def turn(ctx, sample, **params):
    return asyncio.run(ctx.turn(sample, SamplingParams(**{"max_new_tokens": 10, **params})))


def prompt():
    return Sample(index=0, tokens=list(b"ab"))


def routes(n):
    return np.arange(n).reshape(n, 1, 1)


def test_two_turns_with_something_put_in_between_token_by_token():
    first = said(b"cd", p=-0.5, routed_experts=routes(4), top_p_tokens=([99, 1, 100], [0, 2, 3]))
    second = said(
        b"e", p=-0.25, version="4", routed_experts=routes(7), top_p_tokens=([101], [0, 1]), cached_tokens=4
    )
    ctx, sample = context(first, second), prompt()
    ctx.append(sample, ">")
    assert turn(ctx, sample) == "cd"
    ctx.append(sample, [61, 49])
    assert turn(ctx, sample) == "e"
    assert ctx.engine.asked == [(b"ab>", 10), (b"ab>cd=1", 8)]
    assert bytes(sample.tokens) == b"ab>cd=1e"
    assert (sample.response, sample.response_length) == (">cd=1e", 6)
    assert sample.loss_mask == [0, 1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == [0.0, -0.5, -0.5, 0.0, 0.0, -0.25]
    assert sample.environment_spans == [[0, 1], [3, 5]]
    assert (sample.environment_length, sample.generated_length, sample.turn_begin) == (3, 3, 5)
    assert sample.rollout_top_p_token_ids == [99, 1, 100, 101]
    assert sample.rollout_top_p_token_offsets == [0, 0, 2, 3, 3, 3, 4]
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (sample.weight_versions, sample.status) == (["3", "4"], Status.COMPLETED)
    assert sample.weight_version_starts == [1, 5]
    assert version_spans([sample]).by_token().tolist() == [3, 3, 3, 3, 3, 4]
    assert sample.prefix_cache_info == {"cached_tokens": 4, "total_prompt_tokens": 7}
    sample.check()


def test_what_is_put_in_last_repeats_the_last_routes():
    ctx, sample = context(said(b"cd", routed_experts=routes(3))), prompt()
    turn(ctx, sample)
    ctx.append(sample, "!?")
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [0, 1, 2, 2, 2]
    sample.check()


def test_text_is_encoded_once_and_ids_are_taken_as_they_are():
    ctx, sample = context(), prompt()
    ctx.append(sample, "é")
    ctx.append(sample, np.array([0xC3, 0xA9]))
    ctx.append(sample, [1], text="<one>")
    assert sample.response_tokens == [0xC3, 0xA9, 0xC3, 0xA9, 1]
    assert sample.response == "éé<one>"
    assert sample.environment_spans == [[0, 2], [2, 4], [4, 5]]


def test_an_aborted_turn_goes_on_and_its_text_is_whole():
    first, second = "é".encode()
    ctx = context(said(b"x"), said(bytes([first]), reason="abort"), said(bytes([second]) + b"y"))
    sample = prompt()
    turn(ctx, sample)
    ctx.append(sample, "=")
    assert turn(ctx, sample) == "\N{REPLACEMENT CHARACTER}"
    assert sample.status is Status.ABORTED
    assert turn(ctx, sample) == "éy"
    assert (sample.response, sample.status) == ("x=éy", Status.COMPLETED)
    assert sample.environment_spans == [[1, 2]]


def test_a_stop_string_does_not_begin_in_what_was_put_in():
    ctx = context(said(b"x"), said(b"b", reason="abort"), said(b"cd"))
    sample = prompt()
    turn(ctx, sample)
    ctx.append(sample, "a")
    turn(ctx, sample)
    assert turn(ctx, sample, stop=("ab", "abc")) == "bcd"


def test_a_stop_string_across_the_seam_of_a_later_turn_ends_it():
    ctx = context(said(b"x"), said(b"<", reason="abort"), said(b"/a>zz"))
    sample = prompt()
    turn(ctx, sample)
    ctx.append(sample, "abc")
    turn(ctx, sample, stop=("</a>",))
    assert turn(ctx, sample, stop=("</a>",)) == "</a>"
    assert bytes(sample.response_tokens) == b"xabc</a>"
    sample.check()


def test_the_budget_is_of_the_policys_tokens_and_the_context_is_of_all():
    sample = prompt()
    ctx = context(said(b"cd"), max_context_len=12)
    turn(ctx, sample)
    ctx.append(sample, "=====")
    assert ctx.remaining(sample, SamplingParams(max_new_tokens=10)).max_new_tokens == 12 - 9
    assert ctx.remaining(sample, SamplingParams(max_new_tokens=4, min_new_tokens=3)).max_new_tokens == 2
    assert ctx.remaining(sample, SamplingParams(max_new_tokens=4, min_new_tokens=3)).min_new_tokens == 1


def test_a_turn_that_nothing_is_left_for_asks_nothing():
    ctx, sample = context(said(b"cd")), prompt()
    turn(ctx, sample)
    assert turn(ctx, sample, max_new_tokens=2) == "cd"
    assert (sample.status, len(ctx.engine.asked)) == (Status.TRUNCATED, 1)


def test_no_turn_follows_one_that_was_cut_off():
    ctx, sample = context(said(b"cd", reason="length")), prompt()
    turn(ctx, sample)
    with pytest.raises(SampleError, match="sample 0: status is truncated; wanted one that a turn may follow"):
        turn(ctx, sample)


def test_an_abort_that_generated_nothing_names_no_weights():
    ctx, sample = context(said(b"", reason="abort", version="")), prompt()
    assert turn(ctx, sample) == ""
    assert (sample.status, sample.weight_versions) == (Status.ABORTED, [])


def test_time_outside_of_the_engine_adds_up():
    ctx, sample = context(), prompt()
    for _ in range(2):
        with ctx.outside_engine(sample):
            before = sample.non_generation_time
        assert sample.non_generation_time > before


@pytest.mark.parametrize("spans", [[[0]], [[1, 0]], [[0, 2], [1, 2]], [[0, 3]], [[0.0, 1]], ["ab"], [None]])
def test_spans_that_cannot_be_are_refused(spans):
    sample = Sample(index=0, tokens=[1, 2, 3], response_length=2, environment_spans=spans)
    with pytest.raises(
        SampleError, match=r"sample 0: environment_spans\[[01]\] is .*; wanted \[begin, end\]"
    ):
        sample.check()


def test_what_a_turn_spells_does_not_take_a_decoding_of_the_whole_response():
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, tokens, *, skip_special_tokens=True):
            self.longest = max(self.longest, len(tokens))
            return super().decode(tokens, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    text = "Größe, 大小, 🙂. " * 500
    ids = tokenizer.encode(text)
    for cut in range(len(ids) // 2, len(ids) // 2 + 40):
        wanted = ByteTokenizer().decode(ids[:cut])
        found = text_after(ids[:cut], ids[cut : cut + 50], tokenizer, skip_special_tokens=False)
        whole = ByteTokenizer().decode(ids[: cut + 50])
        assert found == (
            whole[len(wanted) :] if whole.startswith(wanted) else ByteTokenizer().decode(ids[cut : cut + 50])
        )
    assert tokenizer.longest <= 50 + 32


@pytest.mark.parametrize(
    ("said", "last", "stop", "text", "ended_by"),
    [
        ("a</s", ">.", ["</s>"], "a</s>", "</s>"),
        ("a</s", ">", ["</s>"], "a</s>", "</s>"),
        # An earlier token completes it, as where a least number of tokens is wanted.
        ("a</s>", ".", ["</s>"], "a</s>.", None),
        ("</s>a</s", ">.", ["</s>"], "</s>a</s>", "</s>"),
        ("a", "\n\nb", ["\n"], "a\n", "\n"),
        ("a", "xyz", ["yz", "xy"], "axy", "xy"),
        ("a\nO", "b:.", ["b:", "\nOb:"], "a\nOb:", "\nOb:"),
        ("a", "b", ["c", ""], "ab", None),
        ("a", "b", [], "ab", None),
    ],
)
def test_a_turn_ends_after_the_first_stop_string_that_its_last_token_completes(
    said, last, stop, text, ended_by
):
    found = text_to_stop(
        b"12", [*said.encode(), 1], stop, PieceTokenizer({1: last.encode()}), skip_special_tokens=True
    )
    assert found == (text, ended_by)


def test_a_stop_string_is_found_where_the_token_before_ends_within_a_character():
    first, second, third = "€".encode()
    tokenizer, said = PieceTokenizer({1: bytes([third]) + b"!."}), [*b"a", first, second, 1]
    assert text_to_stop([], said, ["€!"], tokenizer, skip_special_tokens=True) == ("a€!", "€!")


def test_a_turn_without_tokens_has_no_stop_string():
    assert text_to_stop(b"12", [], ["1"], ByteTokenizer(), skip_special_tokens=True) == ("", None)
