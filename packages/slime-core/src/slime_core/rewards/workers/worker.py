"""The worker: the process that calls a reward, timed and replaced by its fork server.

It reads jobs and writes replies over private descriptors: a reward prints to standard error, and its standard input
is empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slime_core.errors import SlimeError
from slime_core.rewards.results import Failed, Outcome, group_values, plain_value
from slime_core.rewards.workers.calling import build_reward, explain, is_async, load
from slime_core.rewards.workers.wire import MAX_REPLY_BYTES, Setup, frame, read_frame
from slime_core.runtime.processes.stacks import write_stacks_when_asked
from slime_core.samples import Group, Sample


def serve(
    setup: Setup,
    target: Callable[..., Any] | None,
    jobs: BinaryIO,
    replies: BinaryIO,
    *,
    number: int,
    stacks: int,
) -> None:
    """Say in reply to `number` what the reward is, and answer jobs until the stream ends.

    Args:
        setup: what to run.
        target: the reward; None to import it here.
        jobs: frames of one sample or group each.
        replies: frames of what became of them.
        number: of the first reply.
        stacks: descriptor of the file that gets this process's stacks when they are asked for.
    """
    sys.stdout = sys.stderr
    sys.argv = ["slime-reward"]
    # When memory runs out, the kernel is to take this process, not the trainer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(RuntimeError):  # there may be no standard error
        faulthandler.enable()
    write_stacks_when_asked(stacks)
    try:
        target = target or load(setup)
        asynchronous = is_async(target)
        score = None if asynchronous else build_reward(target, setup.options)
    except SlimeError as error:
        _reply(replies, number, {"error": str(error)})
        return
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    _reply(replies, number, {"is_async": asynchronous})
    if score is not None:
        _answer(score, jobs, replies)


def _answer(score: Callable[[Any], Any], jobs: BinaryIO, replies: BinaryIO) -> None:
    worker = os.getpid()
    while (job := read_frame(jobs)) is not None:
        number, payload = job
        started = time.perf_counter()
        outcomes = _call(score, payload)
        if os.getpid() != worker:
            return  # the reward forked and let the copy return
        seconds = time.perf_counter() - started
        entries = [vars(o) if isinstance(o, Failed) else {"value": o} for o in outcomes]
        _reply(replies, number, {"seconds": seconds, "outcomes": entries})


def _reply(replies: BinaryIO, number: int, answer: Mapping[str, Any]) -> None:
    payload = json.dumps(answer).encode()
    if len(payload) > MAX_REPLY_BYTES and "outcomes" in answer:
        what = f"returned {len(payload)} bytes of JSON; wanted at most {MAX_REPLY_BYTES}"
        failed = [vars(Failed("invalid", what))] * len(answer["outcomes"])
        payload = json.dumps({**answer, "outcomes": failed}).encode()
    replies.write(frame(number, payload))
    replies.flush()


def _call(score: Callable[[Any], Any], payload: bytes) -> list[Outcome]:
    """Call the reward on one sample, or on a group. Whatever it raises is its failure."""
    try:
        subject: Sample | Group = pickle.loads(payload)
    except Exception as error:  # unpickling runs the constructors of whatever is in metadata
        return [Failed("invalid", f"could not be given the sample: {explain(error)}")]
    count = len(subject) if isinstance(subject, list) else 1
    try:
        returned = score(subject)
        if inspect.isawaitable(returned):
            what = "returned a coroutine; declare it with `async def`, or await inside"
            return [Failed("invalid", what)] * count
        return group_values(returned, count) if isinstance(subject, list) else [plain_value(returned)]
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward must not end its worker
        return [Failed("raised", f"raised {explain(error)}")] * count
