"""`slime bench agents`: requests a second of the endpoint, with many sessions at once and an engine that takes no time."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.samples import Sample

from slime_agents.endpoints.agent import Agent
from slime_agents.section import AgentsSection
from slime_agents.tape.tape import TAPE

#: Tokens of one answer.
N_TOKENS = 64
_END = 256


class ByteTokenizer:
    """A token a byte, and one that ends turns."""

    eos_token_id: int | None = _END

    def encode(self, text: str) -> list[int]:
        """Return the bytes; `\\x00` is the end of a turn."""
        return [_END if byte == 0 else byte for byte in text.encode()]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text."""
        spelt = (token for token in tokens if token != _END or not skip_special_tokens)
        return bytes(0 if token == _END else token for token in spelt).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Render each message as `role: content` and the end of a turn."""
        text = "".join(f"{one['role']}: {one['content']}\x00" for one in messages)
        return text + ("assistant: " if kwargs.get("add_generation_prompt", True) else "")

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Refuse."""
        raise ValueError("this tokenizer reads no images")


class SilentEngine:
    """Answers at once: the name of the task that stands in the prompt, filled up to `N_TOKENS`."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer."""
        head = bytes(token for token in tokens[:64] if token != _END).decode(errors="replace")
        name = head.partition("task ")[2].partition(".")[0]
        said = [*f"answer to {name}.".encode()]
        ids = [*said, *[46] * (N_TOKENS - 1 - len(said)), _END]
        return Completion(tokens=ids, log_probs=[-1.0] * len(ids), finish_reason="stop", weight_version="0")


class _Talk(Agent):
    """An agent that talks for so many turns, and checks that each answer is its own."""

    def __init__(self, n_turns: int) -> None:
        super().__init__(
            settings=AgentsSection(
                function="asyncio:sleep", reward="program", max_turns=n_turns, timeout_s=3600
            ),
            resolve=_no_plugins,
        )
        self._client: aiohttp.ClientSession | None = None
        self._function = self._talk
        self._n_turns = n_turns

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().close()

    async def _talk(self, base_url: str, api_key: str, task: Mapping[str, Any]) -> float:
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        messages = [{"role": "user", "content": f"task {task['index']}."}]
        own = 0
        for _ in range(self._n_turns):
            body = {"model": "policy", "messages": messages}
            headers = {"Authorization": f"Bearer {api_key}"}
            async with self._client.post(
                f"{base_url}/chat/completions", json=body, headers=headers
            ) as answer:
                message = (await answer.json())["choices"][0]["message"]
            own += message["content"].startswith(f"answer to {task['index']}.")
            messages += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": "on"},
            ]
        return own / self._n_turns


def _no_plugins(group: str, reference: str, *, where: str, explicit: Mapping[str, Any]) -> Any:
    raise LookupError(f"{where}: nothing is to be looked up")


async def measure(n_sessions: int, n_turns: int, *, rounds: int = 1) -> dict[str, float]:
    """Run so many sessions at once, in rounds; returns what came of them.

    Returns:
        `requests_per_s` of time of day and `requests_per_cpu_s` of computing time, client and server in one process together;
        `own`, the share of answers that were the session's own; `exact`, that of tapes with every token in place;
        `memory_growth_mb` of the process over all rounds but the first.
    """
    agent = _Talk(n_turns)
    tokenizer = ByteTokenizer()
    ctx = GenerateContext(engine=SilentEngine(), tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=N_TOKENS * n_turns)
    own, exact, after_first = 0.0, 0, 0
    begin, cpu = time.perf_counter(), time.process_time()

    async def one(index: int) -> tuple[float, bool]:
        done = await agent(ctx, Sample(index=index, prompt=[{"role": "user", "content": "x"}]), params)
        assert isinstance(done, Sample)
        said = [
            message["content"]
            for message in done.metadata[TAPE]["messages"]
            if message["role"] == "assistant"
        ]
        name = f"answer to {index}."
        in_place = done.generated_length == N_TOKENS * n_turns and all(text.startswith(name) for text in said)
        return float(done.reward) if isinstance(done.reward, float) else 0.0, in_place

    try:
        for i in range(rounds):
            results = await asyncio.gather(*(one(index) for index in range(n_sessions)))
            own += sum(share for share, _ in results)
            exact += sum(in_place for _, in_place in results)
            if i == 0:
                after_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        await agent.close()
    n_requests = n_sessions * n_turns * rounds
    return {
        "requests_per_s": n_requests / (time.perf_counter() - begin),
        "requests_per_cpu_s": n_requests / (time.process_time() - cpu),
        "own": own / (n_sessions * rounds),
        "exact": exact / (n_sessions * rounds),
        "memory_growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - after_first) / 1024,
    }


def main(argv: list[str]) -> int:
    """Print what came of the sessions as JSON."""
    parser = argparse.ArgumentParser(prog="slime bench agents", description=__doc__)
    parser.add_argument("--sessions", type=int, default=500, help="sessions at once")
    parser.add_argument("--turns", type=int, default=5, help="turns of each")
    parser.add_argument("--rounds", type=int, default=3, help="how often all of them are run")
    given = parser.parse_args(argv)
    print(json.dumps(asyncio.run(measure(given.sessions, given.turns, rounds=given.rounds)), indent=2))
    return 0
