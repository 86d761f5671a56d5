"""The generator `multi-turn`: budgets, what ends a conversation, environments that misbehave."""

import asyncio
import contextlib
import sys

import pytest
from slime_core.errors import EnvironmentFailure
from slime_core.protocols import Environment, Observation
from slime_core.samples import Sample, Status

from ..byte_tokenizer import PieceTokenizer
from .conversations import Echo, Scripted, converse, record_of

pytestmark = pytest.mark.timeout(120)
ECHO = f"{Echo.__module__}:Echo"


class Trouble(Environment):
    """Misbehaves in `step`, or where it is told to."""

    def __init__(self, *, how: str = "", where: str = "step"):
        self.how, self.where = how, where

    async def _behave(self, where):
        if where != self.where:
            return None
        if self.how == "hang":
            await asyncio.sleep(3600)
        if self.how == "deaf":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        if self.how == "raise":
            raise KeyError("no such room")
        if self.how == "exit":
            sys.exit(0)
        if self.how == "cancel":
            raise asyncio.CancelledError
        return ODD[self.how]

    async def reset(self, sample):
        return await self._behave("reset")

    async def step(self, sample, text):
        return await self._behave("step") or Observation(done=True)

    async def close(self):
        await self._behave("close")


class Blocking(Environment):
    """Has a `step` that is not async."""

    async def reset(self, sample):
        return None

    def step(self, sample, text):
        return Observation(done=True)


ODD = {
    "none": None,
    "text": "hello",
    "reward": Observation(reward=float("nan")),
    "truth": Observation(reward=True),
    "content": Observation(content=3),
    "end": Observation(content=3, done=True),
    "bytes": Observation(content=b"abc"),
    "ids": Observation(content=[1, -1]),
    "floats": Observation(content=[0.5]),
    "surrogate": Observation(content="\ud800"),
    "info": Observation(info=3),
    "siblings": Observation(siblings=[3]),
    "opening": 7,
}


class Branching(Environment):
    """Returns the conversation as it is as a sibling, once."""

    async def reset(self, sample):
        return None

    async def step(self, sample, text):
        branch = Sample.from_dict(sample.to_dict())
        return Observation(done=True, siblings=[branch])


def test_a_conversation_token_by_token():
    (sample,) = converse(ECHO, Scripted(b"cd", b"e"), environment_args={"opening": ">", "scores": True})
    assert sample.response == ">cd=2;e=1;"
    assert sample.loss_mask == [0, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert sample.rollout_log_probs == [0.0, -0.5, -0.5, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert (sample.status, sample.reward) == (Status.COMPLETED, 3.0)
    assert record_of(sample) == {
        "environment": ECHO,
        "turns": 2,
        "environment_tokens": 7,
        "ended_by": "done",
        "reward": 3.0,
        "info": [{"text": "cd"}, {"text": "e"}],
    }
    assert sample.non_generation_time > 0


def test_an_environment_hears_a_turn_up_to_its_stop_string_and_the_tokens_stay():
    tokenizer = PieceTokenizer({1: b">."})
    turns = [*b"c</s", 1], [*b"d</s", 1]
    engine, options = Scripted(*turns), {"environment_args": {"ends": 3}, "tokenizer": tokenizer}
    (sample,) = converse(ECHO, engine, stop=("</s>",), max_new_tokens=10, **options)
    # The second turn, too, ends by its stop string, though it leaves nothing for a third.
    assert [one["text"] for one in record_of(sample)["info"]] == ["c</s>", "d</s>"]
    assert sample.tokens == [*b"ab", *b"c</s", 1, *b"=5;", *b"d</s", 1]
    assert sample.loss_mask == [1] * 5 + [0] * 3 + [1] * 5
    assert sample.response == "c</s>.=5;d</s>."


class EndingTokenizer(PieceTokenizer):
    """Ends a sequence by 2, and the model's folder names 3 besides; 4 and 5 are what a request may stop at."""

    eos_token_id, eos_token_ids = 2, frozenset({2, 3})

    def __init__(self):
        super().__init__({2: b"<|im_end|>", 3: b"<|endoftext|>", 4: b"<|eot_id|>", 5: b"</search>"})


def test_an_environment_does_not_hear_the_id_that_ends_a_sequence_and_it_stays_in_the_response():
    options = {"environment_args": {"ends": 3, "scores": True}, "tokenizer": EndingTokenizer()}
    (sample,) = converse(ECHO, Scripted([*b"42", 2], [*b"7", 3], [2]), stop=("7",), **options)
    assert [one["text"] for one in record_of(sample)["info"]] == ["42", "7", ""]
    assert sample.tokens == [*b"ab", *b"42", 2, *b"=2;", *b"7", 3, *b"=1;", 2, *b"=0;"]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert sample.response == "42<|im_end|>=2;7<|endoftext|>=1;<|im_end|>=0;"
    assert sample.reward == 3.0


def test_the_id_that_ends_a_sequence_is_not_heard_where_a_limit_ends_the_turn_with_it():
    options = {"environment_args": {"ends": 3}, "tokenizer": EndingTokenizer()}
    (sample,) = converse(ECHO, Scripted([*b"42", 2, 99]), max_new_tokens=3, **options)
    assert [one["text"] for one in record_of(sample)["info"]] == ["42"]
    assert (sample.status, sample.response) == (Status.TRUNCATED, "42<|im_end|>")


def test_an_environment_hears_an_end_within_a_turn_and_an_id_that_a_request_stops_at_unless_it_spells_an_end():
    options = {"environment_args": {"ends": 4}, "tokenizer": EndingTokenizer()}
    turns = [[*b"4", 2, *b"2"], [*b"a", 5], [*b"b", 10], [*b"c", 4]]
    (sample,) = converse(ECHO, Scripted(*turns), stop_token_ids=(4, 5, 10), **options)
    assert [one["text"] for one in record_of(sample)["info"]] == ["4<|im_end|>2", "a</search>", "b\n", "c"]


def test_an_environment_hears_all_of_a_turn_that_a_limit_ended():
    options = {"environment_args": {"ends": 3}, "tokenizer": PieceTokenizer({1: b">."})}
    (sample,) = converse(ECHO, Scripted([*b"c</s", 1, 99]), stop=("</s>",), max_new_tokens=5, **options)
    assert [one["text"] for one in record_of(sample)["info"]] == ["c</s>."]


@pytest.mark.parametrize(
    ("options", "response", "ended", "turns"),
    [
        ({"max_turns": 1}, "cdef", "max_turns", 1),
        ({"max_new_tokens": 6}, "cdef=4;gh", "max_new_tokens", 2),
        ({"max_new_tokens": 4}, "cdef", "max_new_tokens", 1),
        ({"max_new_tokens": 3}, "cde", "max_new_tokens", 1),
        ({"max_environment_tokens": 5}, "cdef=4;gh", "max_environment_tokens", 2),
        ({"max_environment_tokens": 2}, "cdef", "max_environment_tokens", 1),
        ({"context": 8}, "cdef", "max_context_len", 1),
        ({"context": 9}, "cdef=4;", "max_context_len", 1),
        ({"context": 10}, "cdef=4;g", "max_context_len", 2),
    ],
)
def test_each_budget_ends_a_conversation_and_is_named(options, response, ended, turns):
    options = {"environment_args": {"ends": 9}, **options}
    (sample,) = converse(ECHO, Scripted(b"cdef", b"gh", b"i"), **options)
    assert (sample.response, sample.status) == (response, Status.TRUNCATED)
    assert (record_of(sample)["ended_by"], record_of(sample)["turns"]) == (ended, turns)


@pytest.mark.parametrize(
    ("own", "response", "turns"), [(9, "cdef=4;", 1), (10, "cdef=4;g", 2), (None, None, 3)]
)
def test_an_evaluation_has_a_context_of_its_own_for_all_turns(own, response, turns):
    options = {"environment_args": {"ends": 3}, "context": 8, "evaluation": {"max_context_len": own}}
    (sample,) = converse(ECHO, Scripted(b"cdef", b"gh", b"i"), **options)
    assert record_of(sample)["turns"] == turns
    if own is None:
        assert sample.status is Status.COMPLETED
    else:
        assert (sample.response, record_of(sample)["ended_by"]) == (response, "max_context_len")


@pytest.mark.parametrize(
    ("options", "ended", "flag"),
    [
        ({"max_environment_tokens": 5}, "max_environment_tokens", "--max-environment-tokens"),
        ({"context": 7}, "max_context_len", "the bound on the context"),
    ],
)
def test_a_conversation_whose_opening_finds_no_room_fails_and_says_why(options, ended, flag):
    """A prompt of 2 tokens, an opening of 6."""
    (sample,) = converse(ECHO, Scripted(b"cdef"), environment_args={"opening": "sixsix"}, **options)
    assert (sample.status, sample.response_length, record_of(sample)["ended_by"]) == (Status.FAILED, 0, ended)
    assert sample.failure.endswith(
        f"what it says first has 6 tokens, and there is no room for them; raise {flag}"
    )


def test_an_answer_that_was_cut_off_is_scored_too():
    args = {"ends": 9, "scores": True}
    (sample,) = converse(ECHO, Scripted(b"cdef"), max_new_tokens=3, environment_args=args)
    assert (sample.reward, sample.status) == (3.0, Status.TRUNCATED)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "step raised KeyError: 'no such room'"),
        ("exit", "step raised SystemExit: 0"),
        ("cancel", "step raised CancelledError, and nobody had cancelled it"),
        ("text", "step returned 'hello' .str.; wanted an Observation"),
        ("reward", "step gave the reward nan; wanted a finite number, or None"),
        ("truth", "step gave the reward True; wanted a finite number"),
        ("content", "found 3; wanted text, or token ids"),
        ("end", "found 3; wanted text, or token ids"),
        ("bytes", "wanted text, or token ids"),
        ("ids", "wanted text, or token ids"),
        ("floats", "wanted text, or token ids"),
        ("surrogate", "wanted text that has a UTF-8 form"),
        ("info", "step gave the info int; wanted a mapping"),
        ("siblings", "step gave siblings that are no Samples"),
    ],
)
def test_an_environment_that_misbehaves_is_an_error_that_names_it_and_the_sample(how, words):
    with pytest.raises(EnvironmentFailure, match=rf"sample 4: the environment .*:Trouble: .*{words}"):
        converse(f"{__name__}:Trouble", Scripted(b"cd", b"e"), environment_args={"how": how})


@pytest.mark.parametrize(
    ("how", "where"), [("hang", "reset"), ("hang", "step"), ("hang", "close"), ("deaf", "step")]
)
def test_an_environment_that_hangs_is_an_error_by_its_deadline(how, where):
    with pytest.raises(
        EnvironmentFailure, match=rf"sample 4: .*Trouble: {where} gave no answer within 0.05 s"
    ):
        converse(
            f"{__name__}:Trouble",
            Scripted(b"cd"),
            environment_args={"how": how, "where": where},
            environment_timeout_s=0.05,
        )


def test_an_opening_of_a_wrong_type_is_an_error():
    with pytest.raises(EnvironmentFailure, match="found 7; wanted text, or token ids"):
        converse(f"{__name__}:Trouble", Scripted(), environment_args={"how": "opening", "where": "reset"})


def test_a_method_that_is_not_async_is_an_error():
    with pytest.raises(EnvironmentFailure, match="Blocking: step is not async: it returned Observation"):
        converse(f"{__name__}:Blocking", Scripted(b"cd"))


def test_an_environment_is_closed_whatever_happens():
    before = Echo.closed
    converse(ECHO, Scripted(b"cd", b"e"))
    with pytest.raises(Exception, match="pop from empty list"):
        converse(ECHO, Scripted(b"cd"))
    assert Echo.closed == before + 2


def test_branches_are_samples_of_the_same_execution():
    sample, branch = converse(f"{__name__}:Branching", Scripted(b"cd"))
    assert (sample.rollout_id, branch.rollout_id) == (4, 4)
    assert branch.response == "cd"
