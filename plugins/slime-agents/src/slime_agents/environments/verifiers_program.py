"""Plays one task of a verifiers v1 environment, as an agent program of slime: run it by the interpreter that has verifiers.

It imports nothing of slime, because verifiers and SGLang cannot be installed beside each other. `SLIME_BASE_URL` and `SLIME_API_KEY` say where
the policy is asked, the task on standard input or in `SLIME_TASK` which one is played: its metadata has, under `verifiers`,

    {"env": {"taskset": {"id": "..."}, ...}, "task": 17}

`env` is verifiers' own `[env]` block, `task` the number of a task of the taskset. The reward of the episode, the mean over its traces, is posted to
`SLIME_BASE_URL/reward`. It ends with status 1 and the errors where the episode is not ok, 2 where the task is not understood.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any


async def play(told: Mapping[str, Any], base_url: str) -> Any:
    """Return the episode of a task."""
    clients: Any = importlib.import_module("verifiers.v1.clients")
    evaluation: Any = importlib.import_module("verifiers.v1.configs.cli.eval")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    config = evaluation.EvalConfig.model_validate(
        {
            "env": told["env"],
            "model": "policy",
            "client": {"type": "eval", "base_url": base_url, "api_key_var": "SLIME_API_KEY"},
            "sampling": told.get("sampling", {}),
        }
    )
    env = loaders.load_environment(config.env)
    number = int(told.get("task", 0))
    task = next(itertools.islice(iter(env.taskset), number, None), None)
    if task is None:
        raise ValueError(f"task {number}: the taskset has fewer")
    context = clients.ModelContext(client=config.client, model=config.model, sampling=config.sampling)
    async with env.serving():
        return await env.run_episode(task, context)


def main() -> int:
    """Play, and post the reward."""
    base_url = os.environ["SLIME_BASE_URL"]
    try:
        told = json.loads(os.environ["SLIME_TASK"])["metadata"]["verifiers"]
        episode = asyncio.run(play(told, base_url))
    except (KeyError, TypeError, ValueError) as error:
        print(
            f"metadata.verifiers: {type(error).__name__}: {error}; wanted env, and perhaps task",
            file=sys.stderr,
        )
        return 2
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        print("\n".join(f"{error.type}: {error.message}" for error in errors), file=sys.stderr)
        return 1
    reward = sum(trace.reward for trace in episode.traces) / len(episode.traces)
    request = urllib.request.Request(
        f"{base_url}/reward",
        data=json.dumps({"reward": reward}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['SLIME_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
