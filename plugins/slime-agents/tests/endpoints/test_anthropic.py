"""Agents that use the official `anthropic` package."""

from __future__ import annotations

import anthropic
import pytest

from .running import check_tape, played
from .test_openai import looks_then_tells

LOOK = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_the_anthropic_package_calls_tools_and_is_trained_on_one_tape(stream):
    async def agent(base_url, api_key, task):
        client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        messages = list(task["prompt"])
        for _ in range(3):
            asked = {
                "model": "m",
                "max_tokens": 500,
                "system": "Look.",
                "messages": messages,
                "tools": [LOOK],
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                return float(answer.stop_reason == "end_turn" and answer.content[0].text == "It is done.")
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": f"saw {one.input['at']}"}
                for one in uses
            ]
            messages.append({"role": "user", "content": results})
        return 0.0

    samples, engine = played(agent, looks_then_tells, reward="program")
    assert (len(samples), samples[0].reward) == (1, 1.0)
    check_tape(samples, engine)


def test_stop_sequences_thinking_and_counts_of_tokens():
    async def agent(base_url, api_key, task):
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "count"}]
        asked = {"model": "m", "messages": messages, "max_tokens": 500}
        counted = await client.messages.count_tokens(model="m", messages=messages)
        cut = await client.messages.create(**asked, stop_sequences=["5"])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "5")
        assert cut.usage.input_tokens == counted.input_tokens
        thought = await client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in thought.content] == ["thinking", "text"]
        messages += [{"role": "assistant", "content": thought.content}, {"role": "user", "content": "on"}]
        await client.messages.create(**asked)
        return 1.0

    samples, engine = played(agent, lambda text: "<think>\nhm\n</think>\n\n1234567", reward="program")
    assert samples[0].reward == 1.0, samples[0].metadata["agent"]["output"]
    check_tape(samples, engine)
    assert [fork["reason"] for fork in samples[0].metadata["agent"]["forks"]] == [
        "asked again after message 0"
    ]


def test_an_image_is_refused_by_name():
    async def agent(base_url, api_key, task):
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        with pytest.raises(anthropic.BadRequestError, match="'image'; this endpoint takes text only"):
            await client.messages.create(
                model="m",
                max_tokens=9,
                messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],
            )
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        return 1.0

    samples, _ = played(agent, lambda text: "y", reward="program")
    assert samples[0].reward == 1.0, samples[0].metadata["agent"]["output"]
