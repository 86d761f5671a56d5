"""Transport `disk`: folders that appear whole."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.plugins.registry import Registry
from slime_models.hf.folder import HfCheckpoint
from slime_models.transfer.manifest import read_manifest
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.staging import StagedTensors
from slime_models.transfer.transports.delta import DeltaChannel
from slime_models.transfer.transports.disk import DiskChannel

from ..updates import plan_of, send, tensors


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_text("old weights")
    return folder


def test_disk_leaves_a_hugging_face_folder_with_its_manifest(tmp_path, model_folder):
    target, values = tmp_path / "out", tensors(1)
    sender = WeightSender(asyncio.to_thread, Registry())
    sent = send(sender, plan_of("disk", DiskChannel(folder=target, config_from=model_folder)), values)
    written = HfCheckpoint(target)
    assert {name: written[name].tolist() for name in written} == {n: t.tolist() for n, t in values.items()}
    assert (target / "config.json").read_text() == '{"model_type": "llama"}'
    manifest = read_manifest(target)
    assert manifest.version == "7"
    assert {entry.name: entry.fingerprint for entry in manifest.entries} == sent
    assert sender.last_bytes == (15 + 130) * 4
    assert not StagedTensors(target).is_mapped


@pytest.mark.parametrize("transport", ["disk", "disk-delta"])
def test_a_sender_that_fails_leaves_no_folder(tmp_path, model_folder, transport):
    target = tmp_path / "out" / "v1"
    channel = (
        DiskChannel(folder=target, config_from=model_folder)
        if transport == "disk"
        else DeltaChannel(folder=target, base=None, encoding="xor")
    )

    async def broken():
        yield [("a", torch.zeros(3))], {"a": 1}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(WeightSender(asyncio.to_thread, Registry()).send(plan_of(transport, channel), broken()))
    assert list((tmp_path / "out").iterdir()) == []
