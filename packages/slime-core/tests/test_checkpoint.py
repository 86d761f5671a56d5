"""Checkpoints: whole or absent, the newest ones kept."""

from __future__ import annotations

import asyncio
import errno

import pytest
from slime_core import checkpoint
from slime_core.errors import CheckpointError


async def write(path):
    (path / "weights").write_bytes(b"w" * 100)


def save(folder, step, *, save_trainer=write, keep=2):
    return asyncio.run(
        checkpoint.save(folder, next_step=step, state={"a": step}, save_trainer=save_trainer, keep=keep)
    )


def test_newest_is_found_and_old_ones_go(tmp_path):
    for step in (2, 4, 10):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000010"]
    found = checkpoint.latest(tmp_path)
    assert (found.next_step, found.state()["a"]) == (10, 10)
    assert (found.trainer / "weights").read_bytes() == b"w" * 100


def test_full_disk_leaves_the_previous_one(tmp_path):
    save(tmp_path, 2)

    async def full(path):
        (path / "weights").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"step_000004: cannot be written: .*No space left.*step_000002 is intact"
    ):
        save(tmp_path, 4, save_trainer=full)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_trainer_error_leaves_nothing_behind(tmp_path):
    async def broken(path):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        save(tmp_path, 4, save_trainer=broken)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_save_is_not_a_checkpoint(tmp_path):
    (tmp_path / ".tmp_step_000006" / "trainer").mkdir(parents=True)
    (tmp_path / "step_000008").mkdir()  # no state.json: not complete
    assert checkpoint.latest(tmp_path) is None
    checkpoint.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000008"]


def test_broken_state_names_the_file(tmp_path):
    made = save(tmp_path, 2)
    (made.path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        made.state()
