"""Sixty hostile rewards: each is a failure that names its sample, in time; the others are scored; nothing is left."""

import asyncio
import os
import runpy
import time
from pathlib import Path

import pytest
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.rewards.workers.process import WorkerProcess
from slime_core.samples import Sample

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parents[2]
HOSTILE = runpy.run_path(str(HERE / "hostile_rewards.py"))["HOSTILE"]
#: Far from what an innocent sample takes: beside busy processes its process has been seen to stand still for a second.
TIMEOUT_S = 5.0
#: Most seconds for a failure that the deadline does not bring, and most that one takes beyond the deadline which does.
IN_TIME_S, LATE_S = 6.0, 5.0
ALONE = [name for name, (_, _, more) in HOSTILE.items() if not more]
GROUPS = [name for name, (_, _, more) in HOSTILE.items() if more]
#: Those that say nothing until they are missed, or that others' samples may suffer from.
SLOW = {
    "kill_its_guard",
    "stop_its_guard_and_fork_server",
    "stop its fork server",
    "fork_and_fork",
    "memory",
    "very long",
}


@pytest.fixture
def mark(monkeypatch):
    """Give all processes below this one a mark; returns those that still have it and live."""
    monkeypatch.setenv("TEST_MARK", f"{os.getpid()}.{time.monotonic_ns()}")
    wanted = f"TEST_MARK={os.environ['TEST_MARK']}".encode()

    def left():
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment, state = (folder / "environ").read_bytes(), (folder / "stat").read_text()
            except OSError:
                continue
            if wanted in environment.split(b"\0") and state.rpartition(")")[2].split()[0] not in "ZX":
                found.append(folder.name)
        return found

    return left


class ClockWithoutStarts:
    """Seconds in which no process was starting: a start has a deadline of its own, which is no part of a call's.

    What a reward writes into the pipes of its process costs up to two fresh ones, one after the other. Each is a new
    interpreter, which takes half a second on an idle machine and more than two beside busy processes.
    """

    def __init__(self, start, monotonic=time.monotonic):
        self._start, self._monotonic = start, monotonic
        self._starting, self._since, self._stood_still_s = 0, 0.0, 0.0
        self.n_starts = 0

    async def start(self, setup):
        """Start a process as `WorkerProcess.start` does."""
        self._since = self._since if self._starting else self._monotonic()
        self._starting += 1
        self.n_starts += 1
        try:
            return await self._start(setup)
        finally:
            self._starting -= 1
            if not self._starting:
                self._stood_still_s += self._monotonic() - self._since

    def now(self):
        return (self._since if self._starting else self._monotonic()) - self._stood_still_s


@pytest.fixture
def clock(monkeypatch):
    clock = ClockWithoutStarts(WorkerProcess.start)
    monkeypatch.setattr(WorkerProcess, "start", clock.start)
    return clock


def scored(names, clock, *, workers=2):
    """Score each in one pool, an innocent sample before and behind; returns results and times."""

    async def timed(pool, sample):
        started = clock.now()
        return await pool.score(sample), clock.now() - started

    async def main():
        settings = {"workers": workers, "timeout_s": TIMEOUT_S, "memory_bytes": 1 << 31}
        async with RewardPool("hostile_rewards:reward", {}, **settings) as pool:
            results = []
            for i, name in enumerate(names):
                fine = pool.score(Sample(index=1000 + i, response="fine"))
                results.append(await asyncio.gather(timed(pool, Sample(index=i, response=name)), fine))
            return results

    return asyncio.run(main())


def assert_bounded(names, results):
    for i, (name, ((result, seconds), fine)) in enumerate(zip(names, results, strict=True)):
        assert isinstance(result, RewardFailure), (name, result)
        assert result.kind in HOSTILE[name][1], (name, result)
        assert result.message.startswith(f"sample {i}: reward hostile_rewards:reward "), (name, result)
        result.message.encode()
        limit_s = TIMEOUT_S + LATE_S if result.kind == "deadline" else IN_TIME_S
        assert seconds < limit_s, (name, seconds)
        assert isinstance(fine, Reward), (name, fine)
        assert fine.score == 1000 + i


def test_there_are_sixty():
    assert len(HOSTILE) >= 60


def test_the_clock_stands_still_while_any_process_starts():
    wall, may_end = [10.0], [asyncio.Event(), asyncio.Event()]

    async def main():
        clock = ClockWithoutStarts(lambda number: may_end[number].wait(), lambda: wall[0])
        told = []

        def later(seconds):
            wall[0] += seconds
            told.append(clock.now())

        later(1)  # 11
        starts = [asyncio.create_task(clock.start(number)) for number in range(2)]
        await asyncio.sleep(0)  # both start
        later(5)
        for start, event in zip(starts, may_end, strict=True):
            event.set()
            await start
            later(3)  # the first time one still starts
        return told

    assert asyncio.run(main()) == [11, 11, 11, 14]


def test_hostile_rewards_fail_by_name_in_time_and_leave_nothing(mark, clock):
    names = [name for name in ALONE if name not in SLOW]
    results = scored(names, clock)
    assert mark() == []
    assert_bounded(names, results)
    # Two workers, one in the place of the fork server that is killed, and two after the one whose pipes are written to.
    assert clock.n_starts <= 5


@pytest.mark.parametrize("before", ["forge too many", "garbage once it is scored"])
def test_what_a_reward_leaves_in_its_channel_costs_the_next_sample_nothing(before, mark):
    async def main():
        # "slow" takes 0.6 s, and is to be in time also beside busy processes.
        async with RewardPool("hostile_rewards:reward", {}, workers=1, timeout_s=60) as pool:
            return [
                await pool.score(Sample(index=index, response=response))
                for index, response in enumerate((before, "slow", "slow", "fine"))
            ]

    _, *others = asyncio.run(main())
    assert [result.score for result in others] == [1.0, 2.0, 3.0]
    assert mark() == []


@pytest.mark.faults
@pytest.mark.parametrize("name", sorted(SLOW - {"stop its fork server"}))
def test_rewards_that_go_for_the_guard_or_the_machine_leave_nothing(name, mark, clock):
    results = scored([name], clock)
    assert mark() == []
    assert_bounded([name], results)


def test_a_stopped_fork_server_is_missed_however_many_jobs_it_has(mark, clock):
    async def main():
        async with RewardPool("hostile_rewards:reward", {}, workers=1, timeout_s=TIMEOUT_S) as pool:
            names = ["stop its fork server"] + ["fine"] * 40
            started = clock.now()
            results = await asyncio.gather(
                *(pool.score(Sample(index=i, response=name)) for i, name in enumerate(names))
            )
            return results, clock.now() - started

    (stopped, *others), seconds = asyncio.run(main())
    assert stopped.kind == "crashed"
    assert stopped.message.startswith("sample 0: ")
    assert [result.score for result in others] == list(range(1, 41))
    assert seconds < IN_TIME_S + 5
    assert mark() == []


def test_groups_of_another_form_fail_by_name(mark):
    async def main():
        async with RewardPool("hostile_rewards:group_reward", {}, workers=1, timeout_s=TIMEOUT_S) as pool:
            groups = [
                [Sample(index=4 * i + j, response=name) for j in range(4)] for i, name in enumerate(GROUPS)
            ]
            return [await pool.score_group(group) for group in groups]

    for i, (name, results) in enumerate(zip(GROUPS, asyncio.run(main()), strict=True)):
        assert [result.kind in HOSTILE[name][1] for result in results] == [True] * 4
        assert [r.message.startswith(f"sample {4 * i + j}: ") for j, r in enumerate(results)] == [True] * 4
    assert mark() == []
