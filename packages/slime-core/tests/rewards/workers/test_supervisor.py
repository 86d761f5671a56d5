"""Workers come and go: batches, warm and cold replacements, rewards that are classes."""

import asyncio
import re

import pytest
from slime_core.errors import PluginError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import RewardFailure
from slime_core.samples import Sample

pytestmark = pytest.mark.timeout(300)

#: Writes down that it was imported, and does what the response says.
RECORDING = """
import os, signal, struct, threading, time
with open({log!r}, "a") as log:
    log.write("imported\\n")
{more}

def reward(sample):
    if sample.response == "crash":
        os.abort()
    if sample.response == "hang":
        threading.Event().wait()
    if sample.response == "kill fork server":
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()
    if sample.response.startswith("forge"):
        reply = sample.response.removeprefix("forge").encode()
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack("<QQ", len(reply), int(sample.metadata["job"])) + reply)
            except OSError:
                pass
    return float(sample.index)
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Write the module `recording`; returns how often it was imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    log = tmp_path / "log"

    def write(more=""):
        (tmp_path / "recording.py").write_text(RECORDING.format(log=str(log), more=more))

    write.imports = lambda: log.read_text().count("imported") if log.exists() else 0
    write.text = lambda source: (tmp_path / "recording.py").write_text(source)
    return write


def scored(responses, *, options=None, workers=1, timeout_s=20.0, name="reward"):
    async def main():
        pool = RewardPool(f"recording:{name}", options or {}, workers=workers, timeout_s=timeout_s)
        async with pool:
            samples = [Sample(index=i, response=response) for i, response in enumerate(responses)]
            return await asyncio.gather(*(pool.score(sample) for sample in samples))

    return asyncio.run(main())


def test_who_crashes_or_hangs_in_a_batch_fails_alone(record):
    record()
    responses = ["ok"] * 100
    responses[7] = responses[40] = "crash"
    responses[41] = responses[99] = "hang"
    results = scored(responses, workers=2, timeout_s=5.0)
    failed = {i: result.kind for i, result in enumerate(results) if isinstance(result, RewardFailure)}
    assert failed == {7: "crashed", 40: "crashed", 41: "deadline", 99: "deadline"}
    assert all(results[i].message.startswith(f"sample {i}: ") for i in failed)
    assert all(result.score == i for i, result in enumerate(results) if i not in failed)


def test_who_kills_the_fork_server_fails_alone(record):
    record()
    results = scored(["ok"] * 20 + ["kill fork server"] + ["ok"] * 20)
    assert [i for i, result in enumerate(results) if isinstance(result, RewardFailure)] == [20]
    assert results[20].kind == "crashed"
    assert "was killed by SIGKILL" in results[20].message


@pytest.mark.parametrize(
    "reply",
    [
        "[1]",
        "{}",
        '{"failed": 3}',
        '{"seconds": 1.0, "outcomes": 3}',
        '{"seconds": 1.0, "outcomes": [{"value": "x"}]}',
        "?",
    ],
)
def test_a_reply_that_a_reward_forges_is_garbage_and_the_next_sample_is_scored(record, reply):
    record()

    async def main():
        async with RewardPool("recording:reward", {}, workers=1, timeout_s=20.0) as pool:
            forged = await pool.score(Sample(index=0, response="forge" + reply, metadata={"job": 1}))
            return forged, await pool.score(Sample(index=1))

    forged, after = asyncio.run(main())
    assert forged.kind == "crashed"
    assert "sent garbage" in forged.message
    assert after.score == 1.0


def test_a_replacement_has_the_reward_without_importing_it_again(record):
    record()
    results = scored(["crash", "ok"] * 5)
    assert [result.score for result in results[1::2]] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert record.imports() == 1


def test_where_the_import_leaves_threads_each_worker_imports_by_itself(record):
    record("threading.Thread(target=threading.Event().wait, daemon=True).start()")
    results = scored(["crash", "ok", "crash", "ok"])
    assert [result.score for result in results[1::2]] == [1.0, 3.0]
    assert record.imports() == 1 + 3  # the fork server's, which finds the thread out, and one a worker


CLASS = """
import os

class Counting:
    def __init__(self, *, start):
        if start < 0:
            raise ValueError("below zero")
        self.count = start

    def __call__(self, sample):
        self.count += 1
        return float(self.count)

class Closing:
    def __init__(self, *, path):
        self.path = path

    async def __call__(self, sample):
        return float(len(sample.response))

    async def close(self):
        with open(self.path, "a") as file:
            file.write("closed")

class Mute:
    pass
"""


def test_a_class_is_built_once_a_process_from_the_options(record):
    record.text(CLASS)
    assert [r.score for r in scored(["a", "b"], name="Counting", options={"start": 5})] == [6.0, 7.0]


def test_an_async_class_is_closed_with_its_pool(record, tmp_path):
    record.text(CLASS)
    options = {"path": str(tmp_path / "closed")}
    assert [r.score for r in scored(["ab"], name="Closing", options=options)] == [2.0]
    assert (tmp_path / "closed").read_text() == "closed"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Counting", {"start": -1}, "reward Counting: cannot be built: ValueError: below zero"),
        ("Counting", {}, "missing a required keyword-only argument: 'start'"),
        ("Mute", {}, "its objects cannot be called"),
    ],
)
def test_a_class_that_cannot_be_built_stops_the_start(record, name, options, words):
    record.text(CLASS)
    with pytest.raises(PluginError, match=words):
        scored([], name=name, options=options)


def test_what_a_reward_preloads_is_done_before_its_first_call(record, tmp_path):
    record.text("""
from slime_core.rewards.workers.calling import preloads
ready = []

def get_ready():
    ready.append(1)

@preloads("colorsys", "recording:get_ready")
def reward(sample):
    import sys
    return float(len(ready) + ("colorsys" in sys.modules))

@preloads("no_such_module")
def unready(sample):
    return 0.0
""")
    assert scored(["x"])[0].score == 2.0
    with pytest.raises(PluginError, match="no_such_module, which it preloads, fails: ModuleNotFoundError"):
        scored([], name="unready")


def test_a_worker_that_the_system_does_not_start_again_fails_its_reward_and_no_other(record, monkeypatch):
    record()
    start, refused = asyncio.create_subprocess_exec, []

    async def full(*words, **more):
        if record.imports() == 1 and not refused:
            refused.append(True)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*words, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    died, lost, scored_again = scored(["kill fork server", "good", "good"])
    assert refused == [True]
    assert isinstance(died, RewardFailure) and isinstance(lost, RewardFailure)
    told = "could not be started again: .*its process does not start: .*Resource temporarily unavailable"
    assert re.search(told, lost.message)
    assert scored_again.score == 2.0
