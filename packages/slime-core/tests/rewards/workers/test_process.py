"""The process that calls rewards, as the event loop sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from slime_core.rewards.workers.process import WorkerProcess
from slime_core.rewards.workers.wire import Setup


@pytest.mark.timeout(120)
def test_the_status_of_a_process_that_has_just_ended_is_its_own(tmp_path, monkeypatch, caplog):
    """It ends while the event loop is held up, which learns of that only after it is told to end."""
    (tmp_path / "zero.py").write_text("def reward(sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    setup = Setup(
        reference="zero:reward", options={}, timeout_s=60.0, start_timeout_s=60.0, memory_bytes=None
    )

    async def scenario():
        worker, _ = await WorkerProcess.start(setup)
        pid = worker._process.pid
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        return await worker.kill()

    assert asyncio.run(scenario()) == -signal.SIGKILL
    assert caplog.text == ""
