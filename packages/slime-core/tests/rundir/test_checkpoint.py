"""Checkpoints: whole or absent, the newest ones kept, written at once or while the run goes on."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest
from slime_core.errors import CheckpointError, Interrupted
from slime_core.files.checksums import PIECE, damages, read_manifest, seal
from slime_core.rundir import checkpoint
from slime_core.rundir.checkpoint import Checkpoints
from slime_core.runtime.stop import Stop
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


async def turns(n):
    for _ in range(n):
        await asyncio.sleep(0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_is_found_and_old_ones_go(tmp_path):
    save(tmp_path, 2, 4, 10)
    assert names(tmp_path) == ["step_000004", "step_000010"]
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state()["a"]) == (10, 10)
    assert np.load(found.trainer / "table.npy").shape == (27, 27)


def test_one_that_is_written_again_has_its_name_before_the_earlier_one_is_deleted(tmp_path, monkeypatch):
    """Deleting takes long where files are large: a kill meanwhile must not cost the step."""
    save(tmp_path, 3)
    there = []
    delete = shutil.rmtree

    def rmtree(path, **options):
        if (path / "state.json").exists():
            there.append((path.name, json.loads((tmp_path / "step_000003/state.json").read_text())["a"]))
        delete(path, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)

    async def again():
        checkpoints = Checkpoints(tmp_path, Trainer(), keep=2, in_background=False)
        await checkpoints.save(3, {"a": "again"})

    asyncio.run(again())
    assert there == [(".old_step_000003", "again")]
    assert names(tmp_path) == ["step_000003"]


def test_one_that_was_put_aside_for_another_of_its_step_comes_back_where_that_has_no_name_yet(tmp_path):
    """As a kill between the two renames leaves them."""
    save(tmp_path, 3)
    shutil.copytree(tmp_path / "step_000003", tmp_path / ".tmp_step_000003")
    (tmp_path / "step_000003").rename(tmp_path / ".old_step_000003")
    aside = checkpoint.latest(tmp_path)
    assert (aside.step, aside.state()["a"]) == (3, 3)
    aside.verify()
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step_000003"]
    (tmp_path / ".old_step_000002").mkdir()  # of a deletion that was interrupted
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step_000003"]


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
    (tmp_path / ".old_step_000002" / "trainer").mkdir(parents=True)
    (tmp_path / "step_000008.damaged").mkdir()
    (tmp_path / "step_\u00b2").mkdir()
    assert checkpoint.latest(tmp_path) is None
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step_000008.damaged", "step_\u00b2"]


def test_broken_state_names_the_file(tmp_path):
    save(tmp_path, 2)
    made = checkpoint.latest(tmp_path)
    (made.path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        made.state()


def flipped(path, at=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "changed": (lambda made: flipped(made.trainer / "table.npy", 500), "found changed: trainer/table.npy;"),
    "shorter": (lambda made: (made.path / "state.json").write_text(""), "found changed: state.json;"),
    "missing": (lambda made: (made.trainer / "table.npy").unlink(), "found missing: trainer/table.npy;"),
    "additional": (lambda made: (made.path / "x").touch(), "found additional: x;"),
    "a link": (lambda made: (made.path / "x").symlink_to(made.path), "found additional: x;"),
    "a pipe": (
        lambda made: ((made.path / "state.json").unlink(), os.mkfifo(made.path / "state.json")),
        "found changed: state.json;",
    ),
    "no manifest": (lambda made: (made.path / "manifest.json").unlink(), "found no manifest.json "),
    "manifest": (lambda made: flipped(made.path / "manifest.json", 2), "found manifest.json with no JSON"),
    "spelling": (
        lambda made: (made.path / "manifest.json").write_text(
            (made.path / "manifest.json").read_text().replace("{", "{ ", 1)
        ),
        "manifest.json spelt otherwise",
    ),
    "emptied": (lambda made: shutil.rmtree(made.path) or made.path.mkdir(), "found no manifest.json "),
    "a file": (
        lambda made: shutil.rmtree(made.path) or made.path.touch(),
        "found a file that cannot be read (Not a dir",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_so_is_the_newest_intact_checkpoint_before(tmp_path, kind):
    save(tmp_path, 2, 4, 6, 8, keep=4)
    damage, message = DAMAGES[kind]
    made = checkpoint.latest(tmp_path)
    made.verify()
    damage(made)
    flipped(tmp_path / "step_000006/state.json")  # is not intact either
    with pytest.raises(CheckpointError) as caught:
        checkpoint.latest(tmp_path).verify()
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/step_000008: ")
    assert message in text
    assert f"the newest intact one before it is {tmp_path}/step_000004: " in text
    command = text.split("`")[1]
    subprocess.run(command, shell=True, check=True)
    subprocess.run(command.replace("000008", "000006"), shell=True, check=True)
    found = checkpoint.latest(tmp_path)
    found.verify()
    assert found.step == 4


def test_a_file_of_several_pieces_is_checked_whole(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2 * PIECE + 5)
    seal(tmp_path, 1)
    wanted = hashlib.sha256(b"".join(hashlib.sha256(bytes(n)).digest() for n in (PIECE, PIECE, 5)))
    manifest = read_manifest(tmp_path)
    assert manifest.files["large"].sha256_of_pieces == wanted.hexdigest()
    assert damages(tmp_path, manifest) == []
    for at in (PIECE, 2 * PIECE + 4):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"1")
        assert damages(tmp_path, manifest) == ["changed: large"]
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\0")


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "step_000004").rename(tmp_path / "step_000099")
    with pytest.raises(
        CheckpointError, match=r"step_000099: found the checkpoint that step_000004 was; .*step_000002"
    ):
        checkpoint.latest(tmp_path).verify()
    (tmp_path / "step_000099").rename(tmp_path / "best")
    found = checkpoint.to_start_from(tmp_path / "none", load=str(tmp_path / "best"))
    found.verify()  # a name that says no step contradicts none
    assert found.step == 4


def test_with_no_intact_checkpoint_before_none_is_named(tmp_path):
    save(tmp_path, 2)
    made = checkpoint.latest(tmp_path)
    flipped(made.path / "state.json")
    with pytest.raises(CheckpointError, match="no checkpoint before it is intact"):
        made.verify()


def test_every_one_of_200_flipped_bytes_is_found(tmp_path):
    save(tmp_path, 2, 4)
    made, generator = checkpoint.latest(tmp_path), random.Random(0)
    files = [path for path in sorted(made.path.rglob("*")) if path.is_file()]
    for _ in range(200):
        path = generator.choice(files)
        whole = path.read_bytes()
        data, at = bytearray(whole), generator.randrange(len(whole))
        data[at] = (data[at] + generator.randrange(1, 256)) % 256
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"before it is .*/step_000002: "):
            made.verify()
        path.write_bytes(whole)
    made.verify()


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


def test_a_run_that_is_interrupted_while_its_last_checkpoint_is_completed_keeps_it(tmp_path):
    async def main():
        trainer, stop = Trainer(), Stop()
        checkpoints = Checkpoints(tmp_path, trainer, keep=2, in_background=True, held=stop.held)
        trainer.may_write.clear()
        await checkpoints.save(2, {})
        ending = asyncio.ensure_future(stop.obey("the run", checkpoints.complete(wait=True)))
        await turns(5)
        stop.ask(Interrupted(signal.SIGTERM))
        await turns(5)  # in which work that is cancelled would end
        assert names(tmp_path) == [".tmp_step_000002"]

        trainer.may_write.set()
        with pytest.raises(Interrupted):
            await ending
        assert names(tmp_path) == ["step_000002"]

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
