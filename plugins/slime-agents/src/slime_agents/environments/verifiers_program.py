"""Plays one task of a verifiers v1 environment, as an agent program of slime: run it by the interpreter that has verifiers.

It imports nothing of slime, because verifiers and SGLang cannot be installed beside each other. `SLIME_BASE_URL` and `SLIME_API_KEY` say where
the policy is asked, the task on standard input which one is played: its metadata has, under `verifiers`,

    {"env": {"taskset": {"id": "..."}, ...}, "task": 17}

`env` is verifiers' own `[env]` block, `task` the number of a task of the taskset. The reward of the episode, the mean over its traces, is posted to
`SLIME_BASE_URL/reward`. It ends with status 1 and the errors where the episode is not ok, 2 where the task is not understood.

Starting verifiers takes 7 s of computing time. `verifiers_program.py serve SOCKET` starts it once, for as long as it runs; then
`verifiers_program.py ask SOCKET`, by any interpreter, has an episode played there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

#: Most bytes of a task.
_LIMIT = 1 << 24


class Player:
    """Plays episodes, several at once, each environment loaded once. Use as an asynchronous context manager."""

    def __init__(self) -> None:
        self._clients: Any = importlib.import_module("verifiers.v1.clients")
        self._config: Any = importlib.import_module("verifiers.v1.configs.cli.eval").EvalConfig
        self._load: Any = importlib.import_module("verifiers.v1.utils.loaders").load_environment
        self._loading: dict[str, asyncio.Task[tuple[Any, list[Any]]]] = {}
        self._open, self._numbers = contextlib.AsyncExitStack(), itertools.count()

    async def __aenter__(self) -> Player:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the environments."""
        await self._open.aclose()

    async def play(self, told: Mapping[str, Any], base_url: str, api_key: str) -> tuple[int, Any]:
        """Return (0, the reward) of an episode, or (1 or 2, what went wrong)."""
        variable = (
            f"SLIME_API_KEY_{next(self._numbers)}"  # a key is given to verifiers by the name of a variable
        )
        os.environ[variable] = api_key
        try:
            episode = await self._episode(told, base_url, variable)
        except (KeyError, TypeError, ValueError) as error:
            return 2, _misunderstood(error)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            return 1, "\n".join(f"{error.type}: {error.message}" for error in errors)
        return 0, sum(trace.reward for trace in episode.traces) / len(episode.traces)

    async def _episode(self, told: Mapping[str, Any], base_url: str, variable: str) -> Any:
        config = self._config.model_validate(
            {
                "env": told["env"],
                "model": "policy",
                "client": {"type": "eval", "base_url": base_url, "api_key_var": variable},
                "sampling": told.get("sampling", {}),
            }
        )
        named, number = json.dumps(told["env"], sort_keys=True), int(told.get("task", 0))
        if named not in self._loading:
            self._loading[named] = asyncio.create_task(self._loaded(config.env))
        env, tasks = await self._loading[named]
        if not 0 <= number < len(tasks):
            raise ValueError(f"task {number}: the taskset has fewer")
        context = self._clients.ModelContext(
            client=config.client, model=config.model, sampling=config.sampling
        )
        return await env.run_episode(tasks[number], context)

    async def _loaded(self, config: Any) -> tuple[Any, list[Any]]:
        env = self._load(config)
        await self._open.enter_async_context(env.serving())
        return env, list(env.taskset)


def _misunderstood(error: Exception) -> str:
    return f"metadata.verifiers: {type(error).__name__}: {error}; wanted env, and perhaps task"


def told() -> tuple[Mapping[str, Any], str, str]:
    """Return what is played, the address of the policy and the key, as the generator `agent` gives them."""
    task = json.load(sys.stdin)
    return task["metadata"]["verifiers"], os.environ["SLIME_BASE_URL"], os.environ.get("SLIME_API_KEY", "")


async def played() -> tuple[int, Any]:
    """Play what is told, in this process."""
    given = told()
    async with Player() as player:
        return await player.play(*given)


def asked(path: str) -> tuple[int, Any]:
    """Have what is told played by the process that serves at a socket."""
    given = json.dumps(told()).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(given)
            line = connection.makefile("rb").readline()
    except OSError as error:
        return 1, f"{path}: {error.strerror}; start it by verifiers_program.py serve {path}"
    status, outcome = json.loads(line) if line else (1, f"{path}: it ended, or failed; see what it printed")
    return status, outcome


async def serve(path: str) -> None:
    """Play what is asked at a socket, until the process is ended."""
    async with Player() as player:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Who asked may have been ended meanwhile, at its deadline.
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                outcome = await player.play(*json.loads(await reader.readline()))
                writer.write(json.dumps(outcome).encode() + b"\n")
                await writer.drain()

        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        async with await asyncio.start_unix_server(answer, path, limit=_LIMIT) as server:
            print(f"verifiers is served at {path}", flush=True)
            await server.serve_forever()


def post(reward: float) -> None:
    """Tell the endpoint the reward."""
    request = urllib.request.Request(
        f"{os.environ['SLIME_BASE_URL']}/reward",
        data=json.dumps({"reward": reward}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['SLIME_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()


def main(words: list[str]) -> int:
    """Play, and post the reward; or serve those who do."""
    if words[:1] == ["serve"]:
        asyncio.run(serve(words[1]))
        return 0
    try:
        status, outcome = asked(words[1]) if words[:1] == ["ask"] else asyncio.run(played())
    except (KeyError, TypeError, ValueError) as error:
        status, outcome = 2, _misunderstood(error)
    if status:
        print(outcome, file=sys.stderr)
        return int(status)
    post(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
