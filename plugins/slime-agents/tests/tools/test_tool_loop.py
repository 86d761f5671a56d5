"""The generator `tool-loop`: calls of all formats are answered, and whatever goes wrong is text that the model reads."""

from __future__ import annotations

import json
import time

import pytest
from slime_agents.formats.calls import ToolCall
from slime_agents.formats.glm import Glm
from slime_agents.formats.hermes import Hermes
from slime_agents.formats.llama import Llama
from slime_agents.formats.qwen3_coder import Qwen3Coder
from slime_core.samples import Status

from ..byte_chat import last_of
from .playing import loop_of, played, results_of

HERE = f"{__package__}.calculators" if __package__ else "calculators"


def tool(name, **more):
    return {"kind": "python", "function": f"{HERE}:{name}", **more}


def calls_then_tells(*calls, form=None):
    form = form or Hermes()

    def say(text):
        asked = "<|begin|>tool\n" in text
        return (
            f"Told: {last_of(text, 'tool')}"
            if asked
            else form.write([ToolCall(name, given) for name, given in calls])
        )

    return say


@pytest.mark.parametrize(
    ("name", "form"),
    [("json", Hermes()), ("xml", Glm()), ("llama", Llama()), ("qwen3_coder", Qwen3Coder())],
)
def test_a_call_of_each_format_is_answered_and_results_are_not_trained_on(name, form):
    say = calls_then_tells(("multiply", {"a": 6, "b": 7}), form=form)
    (sample,), engine = played(say, tools={"multiply": tool("multiply")}, tool_format=name)
    assert sample.status is Status.COMPLETED
    assert sample.response.endswith("Told: 42")
    begin, end = sample.environment_spans[0]
    assert sample.loss_mask == [1] * begin + [0] * (end - begin) + [1] * (sample.response_length - end)
    assert (
        bytes(token for token in sample.response_tokens[begin:end] if token < 256).decode()
        == "\ntool\n42\nassistant\n"
    )
    (_, _, first_log_probs), (prompt, second, second_log_probs) = engine.requests
    assert sample.rollout_log_probs == first_log_probs + [0.0] * (end - begin) + second_log_probs
    assert list(sample.tokens) == [*prompt, *second]


def test_text_that_reads_as_a_number_is_text_to_a_tool_that_takes_text():
    written = "<tool_call>later\n<arg_key>text</arg_key>\n<arg_value>2024</arg_value>\n</tool_call>"
    (sample,), _ = played(
        lambda text: "Done." if "<|begin|>tool\n" in text else written,
        tools={"later": tool("later")},
        tool_format="xml",
    )
    assert results_of(sample) == ['{"text": "20242024"}']


def test_the_prompt_has_the_tools_and_the_system_prompt():
    say = calls_then_tells()
    prompts = []
    played(
        lambda text: prompts.append(text) or "no",
        tools={"multiply": tool("multiply")},
        system_prompt="Use tools.",
    )
    assert "Multiply two whole numbers." in prompts[0]
    assert "Use tools." in prompts[0]
    assert prompts[0].endswith("<|begin|>user\nwhat is 6 times 7?<|end|>\n<|begin|>assistant\n")
    assert say is not None


#: Tokens of the question, a byte each, and of what the template puts around it, in which each mark is one: `<|begin|>user\n`,
#: `<|end|>\n` and `<|begin|>assistant\n`.
ASKS = len("what is 6 times 7?") + 6 + 2 + 11


@pytest.mark.parametrize("spare", [0, -1])
def test_a_prompt_that_leaves_no_room_fails_its_sample_and_ends_no_run(spare):
    (sample,), engine = played(lambda text: "no", context=ASKS + spare)
    told = f"sample 0: its prompt has {ASKS} tokens, of at most {ASKS + spare} with the answer"
    assert (sample.status, sample.failure.split(";")[0]) == (Status.FAILED, told)
    assert (list(sample.tokens), engine.requests) == ([], [])


def test_a_prompt_that_leaves_room_for_one_token_is_answered_by_one():
    (sample,), _ = played(lambda text: "no", context=ASKS + 1)
    assert (sample.status, sample.response) == (Status.TRUNCATED, "n")


def test_calls_of_a_turn_are_answered_beside_each_other_in_their_order():
    calls = [("later", {"text": "ab"}), ("multiply", {"a": 2, "b": 3}), ("later", {"text": "c", "n": 1})]
    (sample,), _ = played(
        calls_then_tells(*calls), tools={name: tool(name) for name in ("later", "multiply")}
    )
    assert results_of(sample) == ['{"text": "abab"}', "6", '{"text": "c"}']


def test_what_goes_wrong_is_told_to_the_model_as_text():
    names = ("multiply", "leave", "long", "strange")
    calls = [
        ("multiply", {"a": "six", "b": 7}), ("multiply", {"a": 6}), ("multiply", {"a": 1, "b": 2, "c": 3}), ("divide", {}),
        ("leave", {}), ("long", {}), ("strange", {}),
    ]  # fmt: skip
    tools = {name: tool(name) for name in names} | {"long": tool("long", max_chars=10)}
    (sample,), _ = played(calls_then_tells(*calls), tools=tools)
    results = results_of(sample)
    assert results[0] == "error: multiply: arguments.a: 'six' is not of type 'integer'"
    assert results[1] == "error: multiply: arguments: 'b' is a required property"
    assert "Additional properties are not allowed" in results[2]
    assert results[3] == "error: there is no tool 'divide'; there are multiply, leave, long, strange"
    assert results[4] == "error: leave: RuntimeError: SystemExit: goodbye"
    assert results[5] == "xxxxxxxxxx\n[cut: 10 of 100000 characters]"
    assert results[6] == "half ?"
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('<tool_call>\n{"name": "multiply", "arguments": {"a": 6', "no JSON"),
        ('<tool_call>["multiply"]</tool_call>', "wanted an object with name and arguments"),
        ('<tool_call>{"name": "multiply", "arguments": 7}</tool_call>', "wanted an object"),
        ('<tool_call>{"name": "multiply", "arguments": "{"}</tool_call>', "text that is no JSON"),
        ("<tool_call></tool_call>", "no JSON"),
        ("<tool_call>" + "[" * 100_000, "no JSON"),
    ],
)
def test_a_malformed_call_is_answered_by_what_is_wrong_with_it(said, told):
    say = lambda text: "sorry" if "error" in last_of(text, "tool") else said  # noqa: E731  # one line says it
    (sample,), _ = played(say, tools={"multiply": tool("multiply")}, max_new_tokens=200_000)
    assert told in results_of(sample)[0]
    assert sample.response.endswith("sorry")


FUNCTION = "<tool_call>\n<function=multiply>\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('<tool_call>\n{"name": "multiply"}\n</tool_call>', "error: found no <function=NAME> after <tool_call>"),
        (f"{FUNCTION}<parameter=a>\n6\n</function>", "error: after multiply and its 0 parameters comes '<parameter=a>"),
        (
            f"{FUNCTION}<parameter=a>\nsix\n</parameter>\n<parameter=b>\n7\n</parameter>\n</function>\n</tool_call>",
            "error: multiply: arguments.a: 'six' is not of type 'integer'",
        ),
    ],
)  # fmt: skip
def test_a_malformed_call_of_a_function_is_answered_by_what_is_wrong_with_it(said, told):
    say = lambda text: "sorry" if "error" in last_of(text, "tool") else said  # noqa: E731
    (sample,), _ = played(say, tools={"multiply": tool("multiply")}, tool_format="qwen3_coder")
    assert told in results_of(sample)[0]
    assert sample.response.endswith("sorry")


def test_a_tool_that_hangs_is_given_up_at_its_deadline_and_the_others_answer():
    calls = [("hang", {}), ("multiply", {"a": 6, "b": 7})]
    tools = {"hang": tool("hang", timeout_s=0.2), "multiply": tool("multiply")}
    begin = time.monotonic()
    (sample,), _ = played(calls_then_tells(*calls), tools=tools)
    assert results_of(sample) == ["error: hang gave no answer within 0.2 s", "42"]
    assert time.monotonic() - begin < 2.5


def test_bounds_cut_a_conversation_off():
    say = lambda text: Hermes().write([ToolCall("multiply", {"a": 1, "b": 1})])  # noqa: E731
    (sample,), _ = played(say, tools={"multiply": tool("multiply")}, max_turns=3)
    assert (sample.status, sample.metadata["multi_turn"]["ended_by"]) == (Status.TRUNCATED, "max_turns")
    (sample,), _ = played(say, tools={"multiply": tool("multiply")}, max_tool_tokens=10)
    assert sample.metadata["multi_turn"]["ended_by"] == "max_environment_tokens"
    calls = [("multiply", {"a": 1, "b": 1})] * 3
    (sample,), _ = played(
        calls_then_tells(*calls), tools={"multiply": tool("multiply")}, max_calls_per_turn=2
    )
    assert results_of(sample) == ["1", "1", "error: not called: a turn may have 2 calls"]


def test_an_aborted_conversation_goes_on_from_its_tokens():
    calls = json.dumps({"name": "multiply", "arguments": {"a": 6, "b": 7}})
    answers = iter([f"<tool_call>{calls}</tool_call>", None, "It is 42."])
    import asyncio

    from slime_core.protocols import GenerateContext, SamplingParams
    from slime_core.samples import Sample

    from ..byte_chat import ByteChat, SayingEngine

    async def play():
        loop = loop_of(tools={"multiply": tool("multiply")})
        ctx = GenerateContext(engine=SayingEngine(lambda text: next(answers)), tokenizer=ByteChat())
        sample = await loop(ctx, Sample(index=0, prompt="x"), SamplingParams(max_new_tokens=500))
        assert sample.status is Status.ABORTED
        sample = await loop(ctx, sample, SamplingParams(max_new_tokens=500))
        await loop.close()
        return sample

    sample = asyncio.run(play())
    assert sample.status is Status.COMPLETED
    assert sample.response.endswith("It is 42.")
    assert sample.metadata["multi_turn"]["turns"] == 2
