"""Tapes worked out by hand: what stands between turns for each template, and a client that renders its history anew each time."""

from __future__ import annotations

import asyncio
import json

import pytest
from slime_agents.formats.calls import ToolCall
from slime_agents.tape.messages import normal
from slime_agents.tape.reading import read_turn
from slime_agents.tape.tape import Tape
from slime_agents.tape.template import ChatTemplate
from slime_core.errors import ConfigError, DataError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status

from ..byte_chat import END, ByteChat, SayingEngine, SilentChat
from .conftest import FORMATS
from .scripted import ScriptedEngine
from .test_tape_properties import TOOLS, built, check

RESULTS = [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": "rainy"}]
USER = [{"role": "user", "content": "and now?"}]


@pytest.mark.parametrize(
    ("name", "new", "ended", "cut_off"),
    [
        (
            "smollm2", USER,
            "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3", RESULTS,
            "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3_5", RESULTS,
            "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3", USER,
            "<|start_header_id|>user<|end_header_id|>\n\nand now?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nand now?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "glm45", RESULTS,
            "<|observation|>\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|assistant|>",
            "<|observation|>\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|assistant|>",
        ),
    ],
)  # fmt: skip
def test_what_stands_between_turns_is_what_the_template_writes_there(tokenizer_of, name, new, ended, cut_off):
    tokenizer, _, template = built(tokenizer_of, name)
    between = template.between(new, last_id=tokenizer.eos_token_id)
    assert tokenizer.decode(between, skip_special_tokens=False) == ended
    assert tokenizer.decode(template.between(new, last_id=None), skip_special_tokens=False) == cut_off


def test_another_token_that_ends_a_turn_takes_the_place_of_the_templates_own(tokenizer_of):
    tokenizer, also, template = built(tokenizer_of, "llama3")
    text = tokenizer.decode(template.between(USER, last_id=also[0]), skip_special_tokens=False)
    assert text.startswith("<|start_header_id|>user")
    tokenizer, also, template = built(tokenizer_of, "glm45")
    observation = tokenizer.encode("<|observation|>")[0]
    assert observation in also
    text = tokenizer.decode(template.between(RESULTS, last_id=observation), skip_special_tokens=False)
    assert text.startswith("\n<tool_response>\nsunny")


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_a_conversation_of_plain_texts_is_what_the_template_renders_of_it_whole(tokenizer_of, name):
    tokenizer, _, template = built(tokenizer_of, name)
    engine = ScriptedEngine()
    tape = Tape(
        GenerateContext(engine=engine, tokenizer=tokenizer),
        Sample(index=0),
        SamplingParams(max_new_tokens=500),
        template=template,
    )
    history = [{"role": "user", "content": "What is 2 + 2?"}]

    async def play():
        for said in ("Four.", "It is 4, or IV.", "Yes."):
            engine.next.append(([*tokenizer.encode(said), tokenizer.eos_token_id], "stop"))
            turn = await tape.turn([normal(one) for one in history])
            history.extend([turn.message, {"role": "user", "content": "Are you sure?"}])

    asyncio.run(play())
    whole = tokenizer.apply_chat_template(history[:-1], add_generation_prompt=False)
    assert tokenizer.decode(tape.samples()[0].tokens, skip_special_tokens=False) == whole.rstrip("\n")


def test_eight_sessions_whose_client_drops_thinking_and_writes_calls_anew_are_eight_samples(tokenizer_of):
    """The pattern that made 64 samples of 8 rollouts: thinking stripped, arguments written otherwise, null for no text."""
    tokenizer, _, template = built(tokenizer_of, "qwen3")
    written = template.tool_format

    async def session(index):
        engine = ScriptedEngine()
        ctx = GenerateContext(engine=engine, tokenizer=tokenizer)
        tape = Tape(ctx, Sample(index=index), SamplingParams(max_new_tokens=5000), template=template)
        history = [{"role": "user", "content": "fix the bug"}]
        for i in range(8):
            call = '<tool_call>\n{"name":"look",  "arguments": {"b": [1,2], "a": "x\\ny"}}\n</tool_call>'
            said = f"<think>\nstep {i}\n</think>\n\n" + ("" if i % 2 else "I look.\n") + call
            engine.next.append(([*tokenizer.encode(said), tokenizer.eos_token_id], "stop"))
            turn = await tape.turn([normal(one) for one in history], TOOLS)
            assert turn.finish_reason == "tool_calls"
            (call,) = turn.message["tool_calls"]
            sent = {
                "id": "toolu_1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"a": "x\\ny", "b": [1, 2]}'},
            }
            text = turn.message["content"] or None
            history += [
                {"role": "assistant", "content": text, "tool_calls": [sent]},
                {"role": "tool", "content": f"{i}"},
            ]
            assert written is template.tool_format
        return tape, engine

    async def all_of_them():
        return await asyncio.gather(*(session(index) for index in range(8)))

    played = asyncio.run(all_of_them())
    samples = [sample for tape, _ in played for sample in tape.samples()]
    assert len(samples) == 8
    for tape, engine in played:
        check(tape, engine)
        assert tape.forks == []
        text = tokenizer.decode(tape.samples()[0].tokens, skip_special_tokens=False)
        assert [f"step {i}" in text for i in range(8)] == [True] * 8


def test_versions_of_weights_that_change_between_turns_are_those_of_their_tokens():
    engine = SayingEngine(lambda text: "abc")
    ctx = GenerateContext(engine=engine, tokenizer=ByteChat())
    tape = Tape(ctx, Sample(index=0), SamplingParams(max_new_tokens=500), template=ChatTemplate(ByteChat()))

    async def play():
        history = [{"role": "user", "content": "x"}]
        for version in ("1", "2", "3"):
            engine.version = version
            turn = await tape.turn(history)
            history = [*history, turn.message, {"role": "user", "content": "y"}]

    asyncio.run(play())
    (sample,) = tape.samples()
    sample.check()
    assert sample.weight_versions == ["1", "2", "3"]
    starts = [0, *(end for _, end in sample.environment_spans)]
    assert sample.weight_version_starts == starts
    assert sample.status is Status.COMPLETED


class Pieces(ByteChat):
    """Has a token of two bytes besides: 258."""

    def decode(self, tokens, *, skip_special_tokens=True):
        spelt = [part for one in tokens for part in ([*b":\n"] if one == 258 else [one])]
        return super().decode(spelt, skip_special_tokens=skip_special_tokens)


def test_a_turn_ends_at_its_stop_string_though_its_last_token_spells_more_and_its_tokens_stay():
    engine, tokenizer = ScriptedEngine(), Pieces()
    ctx = GenerateContext(engine=engine, tokenizer=tokenizer)
    tape = Tape(ctx, Sample(index=0), SamplingParams(max_new_tokens=500), template=ChatTemplate(tokenizer))
    user, on = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}

    async def play():
        engine.next += [([*b"look\nSeen", 258], "stop"), ([*b"ok", END], "stop")]
        first = await tape.turn([user], stop=["\nSeen:"])
        await tape.turn([user, first.message, on])
        return first

    first = asyncio.run(play())
    assert (first.message["content"], first.stop_string, first.n_sampled) == ("look", "\nSeen:", 10)
    (sample,) = tape.samples()
    trained = [token for token, on in zip(sample.response_tokens, sample.loss_mask, strict=True) if on]
    assert trained == [*b"look\nSeen", 258, *b"ok", END]


def test_two_requests_that_go_on_from_one_turn_at_once_are_two_branches():
    engine = SayingEngine(lambda text: "abc")
    ctx = GenerateContext(engine=engine, tokenizer=ByteChat())
    tape = Tape(
        ctx, Sample(index=0), SamplingParams(max_new_tokens=500, seed=3), template=ChatTemplate(ByteChat())
    )
    user = {"role": "user", "content": "x"}

    async def play():
        turn = await tape.turn([user])
        await asyncio.gather(
            tape.turn([user, turn.message, {"role": "user", "content": "left"}]),
            tape.turn([user, turn.message, {"role": "user", "content": "right"}]),
        )

    asyncio.run(play())
    check(tape, _as_script(engine))
    assert [fork.shared_turns for fork in tape.forks] == [1]
    assert len(tape.samples()) == 2


def test_a_history_that_ends_with_the_assistant_is_refused():
    ctx = GenerateContext(engine=SayingEngine(lambda text: "abc"), tokenizer=ByteChat())
    tape = Tape(ctx, Sample(index=0), SamplingParams(max_new_tokens=500), template=ChatTemplate(ByteChat()))
    with pytest.raises(DataError, match="the last message is the assistant's"):
        asyncio.run(tape.turn([{"role": "assistant", "content": "me"}]))


def test_calls_that_a_template_does_not_show_are_written_as_the_model_writes_them():
    template = ChatTemplate(SilentChat(), tool_format=FORMATS["json"])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = ByteChat().decode(template.opening([*messages, *RESULTS[:1]], TOOLS))
    assert (
        'assistant\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\ntool\nsunny'
        in text.replace("\n\n", "\n")
    )


ARGUMENTS = {
    "code": ("string", "a = 1\n\n  b"),
    "year": ("string", "2024"),
    "word": ("string", "True"),
    "n": ("integer", 7),
    "ratio": ("number", 0.5),
    "deep": ("boolean", True),
    "shallow": ("boolean", False),
    "place": ("object", {"x": [1, None], "y": "ä"}),
    "all": ("array", ["a", 2]),
    "rest": (["integer", "null"], None),
    "name": (["string", "null"], "none"),
}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "llama3", "glm45"])
def test_a_call_that_a_template_writes_is_read_as_it_was_with_the_types_of_its_tool(tokenizer_of, name):
    tokenizer, _, template = built(tokenizer_of, name)
    properties = {key: {"type": kind} for key, (kind, _) in ARGUMENTS.items()}
    function = {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": properties},
    }
    given = {key: value for key, (_, value) in ARGUMENTS.items()}
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": given}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": function}]
    opened = tokenizer.apply_chat_template(messages[:1], tools=tools)
    whole = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
    assert whole.startswith(opened)
    turn = whole[len(opened) :].rstrip("\n").removesuffix(tokenizer.inner.eos_token)
    (read,) = read_turn(turn, template.tool_format, tools).calls
    assert read == ToolCall("look", given)
    assert {key: type(value) for key, value in read.arguments.items()} == {
        key: type(value) for key, value in given.items()
    }


class MistralChat(ByteChat):
    """Writes calls as no known format reads them."""

    def said(self, message):
        calls = [
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls", ())
        ]
        return message["content"] + f"[TOOL_CALLS]{json.dumps(calls)}" * bool(calls)


class FolderChat(SilentChat):
    folder = "/models/strange"


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        (
            MistralChat(),
            "agents.tool_format: found none, and the chat template of MistralChat writes calls as ",
        ),
        (
            FolderChat(),
            "agents.tool_format: found none, and the chat template of /models/strange shows tools, and does not show calls, ",
        ),
    ],
)
def test_tools_are_refused_where_nobody_says_how_the_model_writes_calls(tokenizer, told):
    formats = tuple(FORMATS.values())
    for template in (ChatTemplate(tokenizer), ChatTemplate(tokenizer, known=formats)):
        assert tokenizer.decode(template.opening(USER)).endswith("and now?\nassistant\n")
        with pytest.raises(ConfigError) as refused:
            template.opening(USER, TOOLS)
        assert str(refused.value).startswith(told)
        with pytest.raises(ConfigError):
            template.between(USER, TOOLS, last_id=None)
    chosen = ChatTemplate(tokenizer, tool_format=FORMATS["xml"], known=formats)
    assert chosen.opening(USER, TOOLS)


class TextArguments(ByteChat):
    """Wants arguments as text, and refuses others."""

    def said(self, message):
        for call in message.get("tool_calls", ()):
            said = call["function"]
            return (
                '<tool_call>\n{"name": "'
                + said["name"]
                + '", "arguments": '
                + said["arguments"]
                + "}\n</tool_call>"
            )
        return message["content"]


def test_the_format_of_a_template_that_wants_arguments_as_text_is_found():
    assert ChatTemplate(TextArguments(), known=tuple(FORMATS.values())).tool_format is FORMATS["json"]


def _as_script(engine):
    from types import SimpleNamespace

    requests = [
        SimpleNamespace(prompt=prompt, ids=ids, log_probs=log_probs)
        for prompt, ids, log_probs in engine.requests
    ]
    return SimpleNamespace(requests=requests)
