"""Folders in shared memory: whose they are, what is left of them, and that their memory is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.manifest import Entry, UpdateManifest
from slime_models.transfer.shared_memory import LockedFolder
from slime_models.transfer.staging import StagedTensors, StagingFolder
from slime_models.transfer.storage import UpdateStorage

OWNER = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from slime_models.transfer.shared_memory import LockedFolder
folder = LockedFolder(Path(sys.argv[1]), prefix="weights-")
(folder.path / "weights.bin").write_bytes(b"much")
print(folder.path.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """A process that has a folder, and the folder's name."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kill_what_removes_it(owner):
    for child in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_folder_goes_with_its_process_however_that_ends(owner, tmp_path, number):
    process, theirs = owner
    os.kill(process.pid, number)
    process.wait()
    deadline = time.monotonic() + 30
    while (tmp_path / theirs).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_goes_when_its_process_exits_without_a_word_about_it(owner, tmp_path):
    process, theirs = owner
    kill_what_removes_it(process)
    process.stdin.close()
    process.wait()
    assert not (tmp_path / theirs).exists()


def test_a_folder_goes_when_the_next_is_made_after_its_process_was_killed_and_not_before(owner, tmp_path):
    process, theirs = owner
    (tmp_path / "other-1").mkdir()
    (tmp_path / "other-1/.lock").touch()
    mine = LockedFolder(tmp_path, prefix="weights-")
    assert names(tmp_path) == sorted(["other-1", mine.path.name, theirs])
    kill_what_removes_it(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    next_one = LockedFolder(tmp_path, prefix="weights-")
    assert names(tmp_path) == sorted(["other-1", mine.path.name, next_one.path.name])
    mine.remove()
    mine.remove()
    assert names(tmp_path) == sorted(["other-1", next_one.path.name])
    next_one.remove()


def test_nobody_else_can_look_into_a_folder_of_weights(tmp_path):
    folder = LockedFolder(tmp_path, prefix="weights-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()


def test_memory_for_an_update_is_taken_before_it_is_written_to(tmp_path):
    staging = StagingFolder(tmp_path / "fits", specs={"w": Spec(shape=(1024, 1024), dtype="float32")})
    assert (staging.folder / "weights.bin").stat().st_blocks * 512 >= 4 * 1024 * 1024
    with pytest.raises(
        WeightSyncError,
        match=r"an update takes 2,199,023,255,552,000 bytes and [\d,]+ are free .*; make room there, .*"
        r"torch is in the run's \(--output-dir\), that of sglang is --sglang-staging-dir",
    ):
        StagingFolder(
            tmp_path / "huge", specs={"w": Spec(shape=(512 * 1024**2, 1024 * 1000), dtype="float32")}
        )
    assert names(tmp_path / "huge") == []


@pytest.mark.parametrize(
    ("options", "stays"),
    [({"owns_disk_dir": True}, False), ({"owns_disk_dir": True, "keep_files": True}, True), ({}, True)],
)
def test_of_a_folder_of_the_run_s_own_what_a_killed_process_left_goes_first(tmp_path, options, stays):
    left = tmp_path / "weights/weight_v000003-left"
    left.mkdir(parents=True)
    place = UpdateStorage(
        specs={}, model_path=tmp_path, staging_dir=tmp_path, disk_dir=tmp_path / "weights", encoding="xor", timeout_s=1,
        **{"keep_files": False} | options,
    )  # fmt: skip
    first = place.new_folder("4")
    first.mkdir(parents=True)
    place.new_folder("5")
    assert (first.exists(), left.exists()) == (True, stays)


def test_what_is_written_to_each_tensor_s_room_is_an_update_in_whatever_order_it_came(tmp_path):
    specs = {"a": Spec(shape=(3,), dtype="float32"), "b": Spec(shape=(2, 2), dtype="int64")}
    staging = StagingFolder(tmp_path, specs=specs)
    values = {"b": torch.arange(4).reshape(2, 2), "a": torch.ones(3)}
    for name, tensor in values.items():
        staging.room(name, tensor.nbytes).copy_(tensor.reshape(-1).view(torch.uint8))
    assert staging.room("a", 16) is None
    assert staging.room("c", 12) is None
    manifest = UpdateManifest(
        version="7",
        entries=[
            Entry(
                name=name, shape=specs[name].shape, dtype=specs[name].dtype, fingerprint=fingerprint(tensor)
            )
            for name, tensor in values.items()
        ],
    )
    update = staging.adopt(manifest, "7")
    assert update.version == "7"
    staged = StagedTensors(tmp_path)
    assert staged.damaged() == []
    assert all(staged.tensor(name).equal(tensor) for name, tensor in values.items())
    assert staging.digest == manifest.digest  # changes can be applied to it
    staging.room("b", 32)[9] ^= 1
    assert staged.damaged() == ["b"]
    again = StagedTensors(tmp_path, before=staged)
    assert again.tensor("a").data_ptr() == staged.tensor("a").data_ptr()  # the memory that is mapped
    assert again.damaged() == ["b"]
    other = StagingFolder(tmp_path / "other", specs=specs)
    other.begin("8")
    other.put(list(values.items()), {})
    moved = StagedTensors(other.seal().folder, before=staged)
    assert moved.tensor("a").data_ptr() != staged.tensor("a").data_ptr()
    assert moved.damaged() == []
    assert moved.is_mapped
    with pytest.raises(WeightSyncError, match="what arrived is version 7"):
        staging.adopt(manifest, "8")
