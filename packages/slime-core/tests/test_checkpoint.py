"""Checkpoints: whole or absent, the newest ones kept, written at once or while the run goes on."""

from __future__ import annotations

import asyncio
import errno
import threading

import numpy as np
import pytest
from slime_core import checkpoint
from slime_core.checkpoint import Checkpoints
from slime_core.errors import CheckpointError
from slime_core.testing.tabular import TabularTrainer


class Trainer(TabularTrainer):
    """Writes when it may, and then perhaps fails."""

    def __init__(self) -> None:
        super().__init__(estimator=None, loss=None, lr=0.0)
        self.may_write = threading.Event()
        self.may_write.set()
        self.fails: Exception | None = None

    def write(self, path, table):
        assert self.may_write.wait(60)
        if self.fails is not None:
            path.write_bytes(b"half")
            raise self.fails
        super().write(path, table)


FULL = OSError(errno.ENOSPC, "No space left on device")


def save(folder, *steps, trainer=None, keep=2):
    async def main():
        checkpoints = Checkpoints(folder, trainer or Trainer(), keep=keep, in_background=False)
        for step in steps:
            await checkpoints.save(step, {"a": step})

    asyncio.run(main())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_is_found_and_old_ones_go(tmp_path):
    save(tmp_path, 2, 4, 10)
    assert names(tmp_path) == ["step_000004", "step_000010"]
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state()["a"]) == (10, 10)
    assert np.load(found.trainer / "table.npy").shape == (27, 27)


def test_full_disk_leaves_the_previous_one(tmp_path):
    save(tmp_path, 2)
    trainer = Trainer()
    trainer.fails = FULL
    with pytest.raises(
        CheckpointError, match=r"step_000004: cannot be written: .*No space left.*step_000002 is intact"
    ):
        save(tmp_path, 4, trainer=trainer)
    assert names(tmp_path) == ["step_000002"]


def test_trainer_error_leaves_nothing_behind(tmp_path):
    trainer = Trainer()
    trainer.fails = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        save(tmp_path, 4, trainer=trainer)
    assert names(tmp_path) == []


def test_interrupted_save_is_not_a_checkpoint(tmp_path):
    (tmp_path / ".tmp_step_000006" / "trainer").mkdir(parents=True)
    (tmp_path / "step_000008").mkdir()  # no state.json: not complete
    assert checkpoint.latest(tmp_path) is None
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step_000008"]


def test_broken_state_names_the_file(tmp_path):
    save(tmp_path, 2)
    made = checkpoint.latest(tmp_path)
    (made.path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        made.state()


def test_in_the_background_it_is_of_the_step_that_it_was_taken_in_and_there_when_whole(tmp_path):
    async def main():
        trainer, state = Trainer(), {"position": [3]}
        checkpoints = Checkpoints(tmp_path, trainer, keep=2, in_background=True)
        trainer.table[0, 0] = 1.0
        trainer.may_write.clear()
        await checkpoints.save(2, state)
        trainer.table[0, 0] = 2.0
        state["position"].append(4)
        await checkpoints.complete(wait=False)
        assert names(tmp_path) == [".tmp_step_000002"]

        trainer.may_write.set()
        await checkpoints.complete(wait=True)
        assert names(tmp_path) == ["step_000002"]
        found = checkpoint.latest(tmp_path)
        assert np.load(found.trainer / "table.npy")[0, 0] == 1.0
        assert found.state() == {"position": [3], "step": 2}

    asyncio.run(main())


def test_the_next_save_waits_for_the_one_in_the_background(tmp_path):
    async def main():
        trainer = Trainer()
        checkpoints = Checkpoints(tmp_path, trainer, keep=2, in_background=True)
        trainer.may_write.clear()
        await checkpoints.save(2, {})
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        following = asyncio.ensure_future(checkpoints.save(4, {}))
        await turn.wait()
        assert names(tmp_path) == [".tmp_step_000002"]

        trainer.may_write.set()
        await following
        assert "step_000002" in names(tmp_path)
        await checkpoints.complete(wait=True)
        assert names(tmp_path) == ["step_000002", "step_000004"]

    asyncio.run(main())


def test_full_disk_in_the_background_is_told_by_the_next_save_which_leaves_the_previous_one(tmp_path):
    async def main():
        trainer = Trainer()
        checkpoints = Checkpoints(tmp_path, trainer, keep=2, in_background=True)
        await checkpoints.save(2, {})
        await checkpoints.complete(wait=True)
        trainer.fails = FULL
        await checkpoints.save(4, {})
        with pytest.raises(
            CheckpointError, match=r"step_000004: cannot be written: .*No space left.*step_000002 is intact"
        ):
            await checkpoints.save(6, {})
        assert names(tmp_path) == ["step_000002"]

    asyncio.run(main())
