"""A deadline that passes while another process is called: the stacks of both ends, and a note that names who did not answer."""

from __future__ import annotations

import asyncio
import logging

import pytest
from slime_core.errors import DeadlineError
from slime_core.runtime.calls import Callee, calling
from slime_core.runtime.deadline import within

STACKS = 'Thread 0x1 (most recent call first):\n  File "/theirs/server.py", line 7 in computes\n'


def callee(name, told=STACKS):
    async def stacks():
        if isinstance(told, Exception):
            raise told
        return told

    return Callee(name, stacks)


async def call(what, whom):
    with calling(what, whom):
        await asyncio.sleep(1000)


def missed(work, **how):
    with pytest.raises(DeadlineError) as caught:
        asyncio.run(within(0.01, "training", work, **how))
    return getattr(caught.value, "__notes__", [])


def test_who_did_not_answer_is_noted_with_its_line_and_both_ends_are_logged(caplog):
    server = callee("server 1")

    async def work():
        silent = callee("server 2", "")
        done = asyncio.ensure_future(asyncio.sleep(0))
        await asyncio.gather(done, call("generate", server), call("generate", server), call("load", silent))

    with caplog.at_level(logging.ERROR):
        notes = missed(work())
    assert notes == [
        "no answer to generate from server 1, at /theirs/server.py:7 in computes; stacks of both ends are in the log",
        "no answer to load from server 2, which does not say where it is; stacks of both ends are in the log",
    ]
    assert caplog.text.count("training: not done after 0.01 s; this process was at\n") == 1
    assert "thread MainThread:" in caplog.text
    assert caplog.text.count(STACKS) == 1
    assert "server 2 was at\n(it says nothing)" in caplog.text


def test_an_end_that_cannot_be_asked_changes_no_error():
    (note,) = missed(call("train", callee("rank 0", OSError("it is gone"))))
    assert note.startswith("no answer to train from rank 0, which does not say where it is")


def test_a_call_that_was_answered_is_not_told(caplog):
    async def work():
        with calling("train", callee("rank 0")):
            await asyncio.sleep(0)
        await asyncio.sleep(1000)

    assert missed(work()) == []
    assert "rank 0" not in caplog.text


@pytest.mark.parametrize(("waits", "n_notes"), [(False, 0), (True, 1)])
def test_calls_of_tasks_that_others_started_count_where_the_work_waits_for_them(waits, n_notes):
    async def main():
        other = asyncio.ensure_future(call("generate", callee("server 1")))
        await asyncio.sleep(0)
        try:
            await within(0.01, "rollout", asyncio.sleep(1000), waits_for_others=waits)
        except DeadlineError as error:
            return getattr(error, "__notes__", [])
        finally:
            other.cancel()

    assert len(asyncio.run(main())) == n_notes
