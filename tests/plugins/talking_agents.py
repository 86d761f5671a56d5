"""Agent functions for tests of whole runs."""

from __future__ import annotations

import asyncio

import openai

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}},
}


async def results_and_forks(base_url, api_key, task):
    """Talk for three turns, with a result of a tool in between whatever the policy says, and change the history once."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(messages):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[LOOK], max_tokens=12
            )
            return answer.choices[0].message.model_dump(exclude_none=True)

        history = list(task["prompt"])
        for said in ("It is 21 °C.", "日本\n\n  twice", "the end"):
            history += [await ask(history), {"role": "tool", "tool_call_id": "1", "content": said}]
        await ask([*history[:3], {"role": "user", "content": "Something else."}])
        return float(task["index"] % 2)


async def letters(base_url, api_key, task):
    """Ask for the letter after the one of the task, and for the one after that."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        history = [{"role": "user", "content": task["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=history)
        said = answer.choices[0].message.content
        return float(said == chr(97 + (ord(task["prompt"]) - 96) % 26))


async def slow_letters(base_url, api_key, task):
    """Ask for two letters one after the other, and take a while in between: weights change meanwhile."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        history = [{"role": "user", "content": task["prompt"]}]
        right = 0
        for wanted in (1, 2):
            answer = await client.chat.completions.create(model="policy", messages=history, max_tokens=1)
            said = answer.choices[0].message.content
            right += said == chr(97 + (ord(task["prompt"]) - 97 + wanted) % 26)
            await asyncio.sleep(0.02 * (task["index"] % 5))
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": chr(98)}]
        return right / 2
