"""Agents and tools for tests of whole runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import aiohttp
import openai
from slime_agents.formats.calls import Spoken, ToolCall
from slime_core.testing.tabular import LetterTokenizer

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


async def three_turns(base_url, api_key, task):
    """Ask three times for up to 20 letters."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        history = [{"role": "user", "content": task["prompt"]}]
        for letter in "abc":
            answer = await client.chat.completions.create(model="policy", messages=history, max_tokens=20)
            said = answer.choices[0].message.content
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": letter}]


async def unruly_letters(base_url, api_key, task):
    """Ask for two letters; but some agents hang, some raise, and some drop their connection and ask again."""
    way = random.random()
    async with aiohttp.ClientSession(headers={"x-api-key": api_key}) as client:

        async def ask(messages, seconds=None):
            within = aiohttp.ClientTimeout(seconds)
            body = {"messages": messages}
            async with client.post(f"{base_url}/chat/completions", json=body, timeout=within) as answer:
                return (await answer.json())["choices"][0]["message"]

        history = [{"role": "user", "content": task["prompt"]}]
        for _ in range(2):
            if way < 0.1:
                with contextlib.suppress(TimeoutError):
                    await ask(history, 0.002)
            history += [await ask(history), {"role": "user", "content": "b"}]
            if way > 0.998:  # few, as each takes its whole deadline
                await asyncio.sleep(1000)
            if way > 0.97:
                raise ValueError("lost")


async def unruly_tool() -> str:
    """Answer with a letter after a while, or never, or with an error."""
    way = random.random()
    await asyncio.sleep(1000 if way < 0.02 else 0.05 * way)
    if way > 0.9:
        raise ValueError("out of order")
    return "b"


def stuck_tool() -> str:
    """Answer with a letter, or hang in a thread."""
    if random.random() < 0.01:
        time.sleep(1000)
    return "c"


class LetterCalls:
    """A tool format of letters: every turn calls both tools, but for one that begins with a vowel, which is the last."""

    def describe(self, tools):
        return ""

    def write(self, calls):
        return ""

    def read(self, text):
        is_last = text[:1] in set("aeiou")
        return Spoken(text, () if is_last else (ToolCall("unruly", {}), ToolCall("stuck", {})))


class DeafTokenizer(LetterTokenizer):
    """Reads what the tokenizer of letters refuses as nothing: results of tools may say anything."""

    def encode(self, text):
        return super().encode("".join(one for one in text if "a" <= one <= "z"))


def load_tokenizer(model_path: Path) -> DeafTokenizer:
    return DeafTokenizer()


def look() -> str:
    """Look outside."""
    return "It is 21 °C.\n\n日本"


class EachTurnCalls:
    """A tool format in which every turn is a call of `look`, whatever it says."""

    def describe(self, tools):
        return "Look."

    def write(self, calls):
        return ""

    def read(self, text):
        return Spoken(text, (ToolCall("look", {}),))


def tell_log_probs(args, rollout_id, rollout_data):
    """Print how many tokens of a step are trained on, and how far the log-probs of engine and trainer are apart at most."""
    parts = zip(
        *(rollout_data[name] for name in ("log_probs", "rollout_log_probs", "loss_masks")), strict=True
    )
    apart = [(ours - theirs).abs()[mask == 1] for ours, theirs, mask in parts]
    print(
        f"\nstep {rollout_id}: {sum(map(len, apart))} tokens, at most {max(float(one.max()) for one in apart)} apart"
    )
