"""The pool against real processes: whatever a reward does, the next sample is scored."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.errors import PluginError, RewardError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import RewardFailure
from slime_core.samples import Sample

from .conftest import pool_of, scores

HERE = str(Path(__file__).parents[1])
pytestmark = pytest.mark.timeout(300)


def ended(pid):
    """Wait until a process that need not be ours has ended; False after a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(60_000))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise", "raised", "raised ValueError: no answer in the response (at "),
        ("raise unprintable", "raised", "raised Unprintable: (its message cannot be shown)"),
        ("sys.exit", "raised", "raised SystemExit: no"),
        ("exit", "crashed", "ended with exit status 3"),
        ("segfault", "crashed", "was killed by SIGSEGV"),
        ("kill", "crashed", "was killed by SIGKILL (out of memory?)"),
        ("close", "crashed", "its process"),
    ],
)
def test_a_failure_names_sample_and_reward_and_the_next_sample_is_scored(action, kind, words):
    failure, after = scores("acting", [action, "ok"])
    assert isinstance(failure, RewardFailure)
    assert failure.kind == kind
    assert failure.message.startswith("sample 0: reward misbehaving_rewards:acting ")
    assert words in failure.message
    assert after.score == 1.0


def test_a_hanging_reward_is_killed_at_its_deadline():
    failure, after = scores("acting", ["hang", "ok"], timeout_s=5)
    assert failure.kind == "deadline"
    assert re.search(
        r"gave no result within 5 s and was killed, at \S+/misbehaving_rewards\.py:\d+ in hang$",
        failure.message,
    )
    assert after.score == 1.0


def test_a_reward_that_eats_memory_fails_at_its_limit():
    failure, after = scores("acting", ["eat memory", "ok"], memory_bytes=1 << 31)
    assert failure.kind == "raised"
    assert "MemoryError" in failure.message
    assert after.score == 1.0


def test_prints_of_the_reward_and_its_children_do_not_reach_the_replies():
    assert [r.score for r in scores("acting", ["print", "ok"])] == [1.0, 1.0]


def test_standard_input_of_a_reward_is_empty():
    assert [r.score for r in scores("acting", ["read", "ok"])] == [0.0, 1.0]


def test_a_reward_that_forks_and_returns_twice_is_heard_once():
    assert [r.score for r in scores("acting", ["fork", "ok", "ok"])] == [1.0, 1.0, 1.0]


def test_one_process_serves_many_samples():
    first, second = scores("acting", ["process", "process"])
    assert first.score == second.score != os.getpid()


@pytest.mark.parametrize("action", ["spawn and hang", "spawn and crash"])
def test_processes_that_the_reward_started_die_with_its_worker(action, tmp_path):
    pids = tmp_path / "pids"
    failure, after = scores("acting", [action, "ok"], metadata={"pids": str(pids)}, timeout_s=5)
    assert failure.kind in ("deadline", "crashed")
    assert after.score == 1.0
    assert all(ended(pid) for pid in json.loads(pids.read_text()))


TRAINER = """
import asyncio, sys
from slime_core.rewards.pool import RewardPool
from slime_core.samples import Sample

async def main():
    async with RewardPool("misbehaving_rewards:acting", {}, workers=1, timeout_s=60) as pool:
        print("ready", flush=True)
        await pool.score(Sample(response="spawn and hang", metadata={"pids": sys.argv[1]}))

asyncio.run(main())
"""


def test_workers_and_their_children_die_when_the_trainer_is_killed(tmp_path):
    pids = tmp_path / "pids"
    os.mkfifo(pids)  # opening it waits for the reward to run
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([HERE, *sys.path])}
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(pids)], env=environment) as trainer:
        below = json.loads(pids.read_text())
        assert len(below) == 4
        trainer.send_signal(signal.SIGKILL)
    assert all(ended(pid) for pid in below)


def test_close_leaves_no_process_and_ends_calls_in_flight(tmp_path):
    pids = tmp_path / "pids"
    os.mkfifo(pids)

    async def main():
        pool = pool_of("acting", workers=2)
        await pool.start()
        call = asyncio.create_task(
            pool.score(Sample(response="spawn and hang", metadata={"pids": str(pids)}))
        )
        idle = await pool.score(Sample(response="process"))
        below = await asyncio.to_thread(lambda: json.loads(pids.read_text()))
        await pool.close()
        await pool.close()
        with pytest.raises(RewardError, match="its pool is closed"):
            await call
        with pytest.raises(RewardError, match="its pool is closed"):
            await pool.score(Sample())
        return [*below, int(idle.score)]

    assert all(ended(pid) for pid in asyncio.run(main()))


def test_a_cancelled_call_frees_its_worker():
    async def main():
        async with pool_of("acting") as pool:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.score(Sample(response="hang")), 0.2)
            return await pool.score(Sample(response="ok"))

    assert asyncio.run(main()).score == 1.0


def test_no_more_calls_at_once_than_workers():
    async def main():
        async with pool_of("acting", workers=2) as pool:
            results = await asyncio.gather(
                *[pool.score(Sample(index=i, response="process")) for i in range(40)]
            )
            return {result.score for result in results}

    assert len(asyncio.run(main())) <= 2


def test_a_result_is_matched_to_its_sample():
    async def main():
        async with pool_of("length", workers=2) as pool:
            return await asyncio.gather(*[pool.score(Sample(index=i, response="x" * i)) for i in range(100)])

    assert [result.score for result in asyncio.run(main())] == list(range(100))


def test_a_large_sample_passes():
    n = 300_000
    (result,) = scores("length", ["y" * n], metadata={"text": "z" * n})
    assert result.score == n


def test_a_loop_that_was_held_up_does_not_miss_a_result_in_time():
    async def main():
        async with pool_of("acting", timeout_s=3) as pool:
            call = asyncio.create_task(pool.score(Sample(response="ok")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the job is on its way
            subprocess.run([sys.executable, "-c", "import threading; threading.Event().wait(5)"], check=True)
            return await call

    assert asyncio.run(main()).score == 1.0


def test_what_a_reward_writes_to_its_sample_is_lost():
    async def main(name):
        sample = Sample(response="change")
        async with pool_of(name) as pool:
            await pool.score(sample)
        return sample

    for name in ("acting", "acting_async"):
        assert asyncio.run(main(name)) == Sample(response="change")


def test_a_sample_that_cannot_be_sent_is_a_failure_of_that_sample():
    failure, after = scores("length", ["one", "two"], metadata={"function": lambda: None})
    assert failure.kind == "invalid"
    assert "cannot be sent the sample" in failure.message
    assert after.kind == "invalid"


def test_async_rewards_run_at_the_same_time_in_this_process():
    async def main():
        async with pool_of("acting_async") as pool:
            assert pool.is_async
            return await asyncio.gather(*[pool.score(Sample(response="process")) for _ in range(3)])

    assert {result.score for result in asyncio.run(main())} == {float(os.getpid())}


def test_the_time_of_an_async_reward_starts_when_it_may_be_called():
    """Four take two seconds each, one after the other: the last is done after eight, each within its five."""

    async def main():
        async with pool_of("OneAtATime", timeout_s=5.0) as pool:
            return await asyncio.gather(*[pool.score(Sample()) for _ in range(4)])

    assert [result.score for result in asyncio.run(main())] == [1.0] * 4


def test_an_object_with_an_async_call_is_async():
    (result,) = scores("judge", [""], options={"bonus": 0.5})
    assert result.score == 2.5


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("hang", "deadline"),
        ("raise", "raised"),
        ("sys.exit", "raised"),
        ("cancel", "raised"),
        ("interrupt", "raised"),
    ],
)
def test_a_failing_async_reward_is_a_failure_and_the_next_sample_is_scored(action, kind):
    failure, after = scores("acting_async", [action, "ok"], timeout_s=0.3)
    assert failure.kind == kind
    assert failure.message.startswith("sample 0: reward misbehaving_rewards:acting_async ")
    if kind == "deadline":
        where = r"gave no result within 0\.3 s and was cancelled, at \S+/misbehaving_rewards\.py:\d+ in acting_async$"
        assert re.search(where, failure.message)
    assert after.score == 1.0


def test_an_async_reward_that_swallows_its_cancellation_does_not_hold_the_pool():
    (failure,) = scores("acting_async", ["hang stubbornly"], metadata={"patience": [0, 1]}, timeout_s=0.1)
    assert failure.kind == "deadline"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("missing", {}, "does not import: AttributeError"),
        ("not_a_function", {}, "found int; wanted a function"),
        (
            "length",
            {"scael": 1},
            "the options \\['scael'\\], but its signature is \\(sample, \\*, scale=1.0\\)",
        ),
    ],
)
def test_a_reward_that_cannot_be_called_stops_the_start(name, options, words):
    with pytest.raises(PluginError, match=words):
        scores(name, [], options=options)


@pytest.mark.parametrize(
    ("source", "words", "start_timeout_s"),
    [
        (
            "import no_such_module",
            "does not import: ModuleNotFoundError: No module named 'no_such_module'",
            60,
        ),
        ("import os; os._exit(5)", "ended with exit status 5 while importing", 60),
        ("import threading; threading.Event().wait()", "does not import within 1 s", 1),
        ("raise SystemExit", "does not import: SystemExit", 60),
    ],
)
def test_a_module_that_does_not_import_stops_the_start(source, words, start_timeout_s, tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def main():
        await RewardPool(
            "broken_reward:f", {}, workers=2, timeout_s=1, start_timeout_s=start_timeout_s
        ).start()

    with pytest.raises(PluginError, match=words):
        asyncio.run(main())


def test_a_pool_that_was_not_started_says_so():
    with pytest.raises(RewardError, match="its pool is new"):
        asyncio.run(pool_of("length").score(Sample()))
