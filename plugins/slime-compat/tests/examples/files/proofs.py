"""A reward by a program that checks proofs: a process a sample, some at once, several numbers of each."""

import asyncio
import json
import sys

from slime.utils.types import Sample

_CHECKER = "import json, sys; t = sys.stdin.read(); print(json.dumps({'ok': t.count('b') > 0, 'errors': t.count('a')}))"
_SEMAPHORE = asyncio.Semaphore(2)


async def reward_fn(args, sample: Sample, **kwargs):
    async with _SEMAPHORE:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHECKER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate(sample.response.encode())
    verdict = json.loads(out)
    sample.metadata["verdict"] = verdict
    return {"reward_value": float(verdict["ok"]), "reward_cat": "success" if verdict["ok"] else "error"}
