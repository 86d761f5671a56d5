"""Agents that use the official `openai` package: Chat Completions and Responses, streamed too."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from slime_core.errors import ConfigError
from slime_core.samples import Status

from ..byte_chat import SilentChat, last_of
from .running import check_tape, played, run_agent

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a\\nb"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "日本"}}\n</tool_call>'
)


def looks_then_tells(text):
    return "It is done." if "saw" in last_of(text, "tool") else TWO_CALLS


async def chat_with_tools(base_url, api_key, task, *, stream=False):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await talk(client, task, stream=stream)


async def talk(client, task, *, stream):
    messages = list(task["prompt"])
    for _ in range(4):
        if stream:
            parts = await client.chat.completions.create(
                model="m", messages=messages, tools=[LOOK], stream=True
            )
            message = await gathered(parts)
        else:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
            message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        if not message.get("tool_calls"):
            return 1.0 if message["content"] == "It is done." else 0.0
        for call in message["tool_calls"]:
            at = json.loads(call["function"]["arguments"])["at"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"saw {at}"})
    return 0.0


async def gathered(parts):
    content, calls = "", {}
    async for part in parts:
        for choice in part.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                one = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                one["function"]["name"] += call.function.name or ""
                one["function"]["arguments"] += call.function.arguments or ""
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls.values())} if calls else {}),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_the_openai_package_calls_tools_and_is_trained_on_one_tape(stream):
    async def agent(base_url, api_key, task):
        return await chat_with_tools(base_url, api_key, task, stream=stream)

    samples, engine = played(agent, looks_then_tells, reward="program")
    (sample,) = samples
    check_tape(samples, engine)
    assert sample.reward == 1.0
    assert sample.status is Status.COMPLETED
    assert sample.metadata["agent"]["turns"] == 2
    assert sample.metadata["agent"]["forks"] == []
    assert sample.metadata["tape"]["messages"][2]["content"] == "saw a\nb"


def test_an_agent_that_offers_tools_ends_the_run_where_nobody_says_how_calls_are_written():
    async def agent(base_url, api_key, task):
        tools = [LOOK] if offers else openai.omit
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="m", messages=task["prompt"], tools=tools)

    offers = False
    (sample,), _ = played(agent, lambda text: "Hello.", tokenizer=SilentChat())
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 7)
    offers = True
    with pytest.raises(
        ConfigError, match=r"agents\.tool_format: found none, and the chat template of SilentChat"
    ):
        played(agent, lambda text: "Hello.", tokenizer=SilentChat())


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_tools_and_go_on_by_the_id_of_the_one_before(stream):
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        tool = {"type": "function", **LOOK["function"], "strict": None}
        given, previous = task["prompt"], None
        for _ in range(3):
            asked = {"model": "m", "input": given, "tools": [tool], "previous_response_id": previous}
            if stream:
                async with client.responses.stream(**asked) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**asked)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text == "It is done.")
            given = [
                {
                    "type": "function_call_output",
                    "call_id": one.call_id,
                    "output": f"saw {json.loads(one.arguments)['at']}",
                }
                for one in calls
            ]
            previous = response.id
        return 0.0

    samples, engine = played(agent, looks_then_tells, reward="program")
    assert samples[0].reward == 1.0
    assert len(samples) == 1
    check_tape(samples, engine)


def test_responses_go_on_by_the_items_that_they_gave():
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        tool = {"type": "function", **LOOK["function"], "strict": None}
        history = list(task["prompt"])
        for _ in range(3):
            response = await client.responses.create(
                model="m", input=history, tools=[tool], instructions="Look."
            )
            history += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            history += [
                {"type": "function_call_output", "call_id": one.call_id, "output": "saw"} for one in calls
            ]
            if not calls:
                return 1.0
        return 0.0

    samples, engine = played(agent, looks_then_tells, reward="program")
    assert (len(samples), samples[0].reward) == (1, 1.0)
    check_tape(samples, engine)


def test_what_is_not_offered_is_refused_by_name_and_the_session_goes_on():
    told = []

    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        ask = client.chat.completions.create
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        user = [{"role": "user", "content": "x"}]
        for wrong in (
            {"messages": [{"role": "user", "content": [image]}]},
            {"messages": user, "n": 2},
            {"messages": user, "response_format": {"type": "json_object"}},
            {"messages": [*user, {"role": "assistant", "content": "y"}]},
            {"messages": user, "max_tokens": -1},
        ):
            try:
                await ask(model="m", **wrong)
            except openai.BadRequestError as error:
                told.append(error.body["message"])
        await ask(model="m", messages=user)
        return 1.0

    samples, engine = played(agent, lambda text: "fine", reward="program")
    assert [message.split(":")[0] for message in told] == [
        "messages[0]", "n", "response_format", "the last message is the assistant's; wanted one that it answers", "max_tokens",
    ]  # fmt: skip
    assert "image_url" in told[0]
    assert samples[0].metadata["agent"]["refused"] == {"invalid_request": 5}
    check_tape(samples, engine)


def test_stop_sequences_and_limits_of_a_turn_hold_and_the_session_goes_on_from_the_cut_turn():
    seen = []

    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "count"}]
        for more in ({"stop": ["5"]}, {"max_tokens": 3}, {}):
            answer = await client.chat.completions.create(model="m", messages=messages, **more)
            seen.append((answer.choices[0].message.content, answer.choices[0].finish_reason))
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "on"}]
        return 1.0

    samples, engine = played(agent, lambda text: "1234567", reward="program")
    assert seen == [("1234", "stop"), ("123", "length"), ("1234567", "stop")]
    assert len(samples) == 1
    assert samples[0].status is Status.COMPLETED
    check_tape(samples, engine)


def test_limits_of_turns_and_tokens_refuse_by_name_and_cut_the_sample_off():
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "a"}]
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "on"}]

    samples, _ = played(agent, lambda text: "abcde", reward="program", max_turns=3)
    record = samples[0].metadata["agent"]
    assert (record["turns"], record["ended_by"], record["refused"]) == (3, "max_turns", {"max_turns": 1})
    assert samples[0].status is Status.TRUNCATED
    samples, _ = played(agent, lambda text: "abcde", reward="program", max_new_tokens=15)
    assert samples[0].metadata["agent"]["ended_by"] == "tokens"
    assert samples[0].generated_length == 15


def test_forks_become_samples_of_one_execution_and_no_id_is_trained_on_twice():
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

        async def ask(*messages):
            answer = await client.chat.completions.create(model="m", messages=list(messages))
            return answer.choices[0].message.model_dump()

        first = {"role": "user", "content": "first"}
        said = await ask(first)
        on, other = {"role": "user", "content": "on"}, {"role": "user", "content": "other"}
        await ask(first, said, on)
        await ask(first, said, other)
        await ask(first, {"role": "assistant", "content": "put into its mouth"}, on)
        return 0.5

    samples, engine = played(agent, lambda text: "an answer", reward="program")
    check_tape(samples, engine)
    forks = samples[0].metadata["agent"]["forks"]
    assert [(fork["parent"], fork["shared_turns"], fork["reason"]) for fork in forks] == [
        (0, 1, "message 2 (user) has another text"),
        (None, 0, "message 1 (assistant) has another text"),
    ]
    assert [sample.reward for sample in samples] == [0.5] * 3
    assert {sample.rollout_id for sample in samples} == {0}


def test_many_sessions_at_once_are_not_mixed():
    async def agent(base_url, api_key, task):
        return await chat_with_tools(base_url, api_key, task)

    def say(text):
        number = text.partition("task ")[2].partition("<")[0]
        return f"done {number}" if "saw" in last_of(text, "tool") else TWO_CALLS.replace("日本", number)

    done, _ = asyncio.run(run_agent(agent, say, n=40, reward="program"))
    for i, samples in enumerate(done):
        (sample,) = samples
        assert sample.index == i
        messages = sample.metadata["tape"]["messages"]
        assert messages[0]["content"] == f"task {i}"
        assert messages[-1]["content"] == f"done {i}"
        ids = {call["id"] for message in messages for call in message.get("tool_calls", [])}
        assert all(one.startswith(f"call_{sample.metadata['agent']['session']}_") for one in ids)
