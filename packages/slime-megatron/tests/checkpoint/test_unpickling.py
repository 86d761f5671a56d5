"""Pickles that would run code, in every file that is loaded: they do not, and one error says what was found."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slime_core.errors import CheckpointError, SlimeError
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_hf, to_megatron
from slime_megatron.checkpoint.finding import find
from slime_megatron.checkpoint.unpickling import read_index
from slime_models.hf.folder import HfCheckpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ..batches import make_batch


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def as_pickle(bomb):
    return pickle.dumps(bomb)


def as_old_pickle(bomb):
    return pickle.dumps({"a": bomb}, protocol=0)


def as_archive(bomb):
    """The form that `torch.save` gives objects and tensors."""
    file = io.BytesIO()
    torch.save([bomb], file)
    return file.getvalue()


FORMS = (as_pickle, as_old_pickle, as_archive)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def armed(marker):
    """Returns a function that yields, for each file of a folder and each form, a copy with a bomb in its place."""

    def each(folder: Path, *added: str):
        names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        for form in FORMS:
            for name in (*names, *map(Path, added)):
                copy = marker.with_name("armed")
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(folder, copy)
                (copy / name).write_bytes(form(Bomb(marker)))
                yield str(name), copy

    return each


def test_bombs_do_go_off(marker):
    for form in (pickle.loads, lambda data: torch.load(io.BytesIO(data), weights_only=False)):
        data = as_archive(Bomb(marker)) if form is not pickle.loads else as_pickle(Bomb(marker))
        form(data)
        marker.rmdir()


def test_torch_itself_runs_it_without_what_takes_its_place(megatron, marker, tmp_path):
    (tmp_path / ".metadata").write_bytes(as_pickle(Bomb(marker)))
    reader = FileSystemReader(tmp_path)
    with contextlib.suppress(AttributeError):  # what the bomb returns is no index
        FileSystemReader.read_metadata.__wrapped__(reader)
    marker.rmdir()
    planner, item = (
        DefaultLoadPlanner(flatten_state_dict=False),
        SimpleNamespace(dest_index=MetadataIndex("a")),
    )
    planner.state_dict = {}
    DefaultLoadPlanner.load_bytes.__wrapped__(planner, item, io.BytesIO(as_archive(Bomb(marker))))
    marker.rmdir()


@pytest.fixture
def saved(make_learner, tmp_path):
    learner = make_learner()
    learner.train(make_batch())
    learner.save(tmp_path / "saved")
    return learner, tmp_path / "saved"


def refused(load, marker):
    with pytest.raises(SlimeError) as caught:
        load()
    assert not marker.exists()
    text = str(caught.value)
    assert 0 < len(text) < 1000
    return text


def test_no_file_of_a_trainers_folder_runs_code(saved, armed, marker, qwen3):
    learner, folder = saved
    registry, n = Registry.from_environment(), 0
    for name, copy in armed(folder):
        assert str(copy) in refused(lambda copy=copy: learner.load(copy), marker) or name == "metadata.json"
        if name != "metadata.json":  # which `convert` does not read
            refused(lambda copy=copy: convert(copy, registry, qwen3[1]), marker)
        n += 1
    assert n == 4 * len(FORMS)
    learner.load(folder)


def convert(folder, registry, model):
    to_hf(find(folder).weights, folder.with_name("hf"), registry, config_from=model, max_file_bytes=10**9)


def test_no_object_beside_the_tensors_runs_code(saved, marker, tmp_path):
    learner, folder = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    objects = [
        name for name, kind in index.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)
    ]
    assert len(objects) > 3
    loaded = 0
    for name in objects:
        copy = tmp_path / "armed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        index = pickle.loads((folder / ".metadata").read_bytes())
        stored = next(stored for place, stored in index.storage_data.items() if place.fqn == name)
        with (copy / stored.relative_path).open("ab") as file:
            stored.offset, stored.length = file.tell(), file.write(as_archive(Bomb(marker)))
        (copy / ".metadata").write_bytes(pickle.dumps(index))
        try:
            learner.load(copy)
        except CheckpointError as error:
            assert "GLOBAL posix.mkdir" in str(error)
            loaded += 1
        assert not marker.exists()
    assert loaded > 0


def test_no_file_of_a_folder_of_megatron_runs_code(armed, marker, qwen3, tmp_path):
    registry = Registry.from_environment()
    to_megatron(qwen3[1], tmp_path / "megatron", registry)
    read = {
        "release/.metadata",
        "release/__0_0.distcp",
        "latest_checkpointed_iteration.txt",
        "hf/config.json",
    }
    for name, copy in armed(tmp_path / "megatron"):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        if name in read:
            refused(lambda copy=copy: convert(copy, registry, copy / "hf"), marker)
            assert not (tmp_path / "hf").exists()
        else:
            convert(copy, registry, copy / "hf")
        assert not marker.exists()


def test_no_file_of_a_hugging_face_folder_runs_code(make_learner, armed, marker, qwen3):
    read = {"config.json", "model.safetensors", "model.safetensors.index.json"}
    assert {"config.json", "model.safetensors"} <= {path.name for path in qwen3[1].iterdir()}
    for name, copy in armed(qwen3[1], "pytorch_model.bin", "model.safetensors.index.json"):
        if name in read:
            refused(lambda copy=copy: make_learner(folder=copy), marker)
        elif name == "pytorch_model.bin":
            (copy / "model.safetensors").unlink()
            assert "found neither model.safetensors" in refused(lambda copy=copy: HfCheckpoint(copy), marker)


def index_with(**changes):
    def change(index):
        for stored in index.storage_data.values():
            for name, value in changes.items():
                setattr(stored, name, value)

    return change


def no_tensors(index):
    index.state_dict_metadata = None


def no_places(index):
    index.storage_data = [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (index_with(relative_path="../other/__0_0.distcp"), "it names the file '../other/__0_0.distcp'"),
        (index_with(relative_path="/etc/passwd"), "it names the file '/etc/passwd'"),
        (index_with(relative_path=".."), "it names the file '..'"),
        (no_tensors, "it lists no tensors"),
        (no_places, "AttributeError"),
    ],
)
def test_an_index_that_names_other_files_or_is_none_is_refused(saved, change, message):
    learner, folder = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="cannot be read as the index") as caught:
        learner.load(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [{"a": 1}, torch.Size([3]), len, pickle])
def test_what_is_no_index_is_refused(tmp_path, value):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value) if value is not pickle else b"cpickle\nloads\n.")
    with pytest.raises(CheckpointError, match="cannot be read as the index"):
        read_index(tmp_path / ".metadata")
