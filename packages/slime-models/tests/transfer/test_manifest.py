"""The manifest of an update, and what is checked of it."""

from __future__ import annotations

import asyncio
import json

import pytest
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.manifest import Entry, TensorCheck, UpdateManifest, read_manifest
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports.delta import DeltaChannel

from .updates import plan_of, send, tensors


def test_weights_have_one_digest_whatever_their_version_and_order(tmp_path):
    def digest(number, values):
        folder = tmp_path / str(number)
        channel = DeltaChannel(folder=folder, base=None, encoding="xor")
        send(
            WeightSender(asyncio.to_thread, Registry()),
            plan_of("disk-delta", channel, version=str(number)),
            values,
        )
        return read_manifest(folder).digest

    same = digest(1, tensors(1)), digest(2, dict(reversed(tensors(1).items())))
    assert same[0] == same[1]
    assert digest(3, tensors(2)) != same[0]


def test_tensors_that_their_family_keeps_in_float32_must_come_so():
    specs = specs_of({"w": (2,), "bias": (2,)}, dtype="bfloat16", float32=frozenset({"bias"}))
    check = TensorCheck(specs, version="7")
    check.see("w", (2,), "bfloat16")
    with pytest.raises(WeightSyncError, match=r"bias: found dtype bfloat16; wanted float32"):
        check.see("bias", (2,), "bfloat16")
    check.see("bias", (2,), "float32")
    check.end()


def test_a_damaged_manifest_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": "7", "entries": [{"name": "a"')
    with pytest.raises(WeightSyncError, match=r"manifest\.json: not the manifest of a weight update"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"version": 7}, r"found version: 7: input should be a valid string"),
        ({"base": None, "more": 1}, "found more: 1: extra inputs are not permitted"),
        ({"entries": [{"shape": [-1]}]}, r"found entries\.0\.shape\.0: -1: "),
        ({"entries": [{"fingerprint": 2**64}]}, r"found entries\.0\.fingerprint: 18446744073709551616: "),
        ({"entries": [{"n_bytes": "many"}]}, r"found entries\.0\.n_bytes: 'many': "),
        ({"entries": [{"encoding": "halved"}]}, r"found entries\.0\.encoding: 'halved': "),
    ],
)
def test_a_manifest_with_a_value_of_another_kind_is_refused_by_its_field(tmp_path, change, found):
    entry = Entry(name="a", shape=(2,), dtype="float32", fingerprint=2**64 - 1, n_bytes=8)
    UpdateManifest(version="7", entries=[entry]).write(tmp_path)
    assert read_manifest(tmp_path) == UpdateManifest(version="7", entries=[entry])
    path = tmp_path / "manifest.json"
    values = json.loads(path.read_text())
    changes = change | {"entries": [values["entries"][0] | each for each in change.get("entries", [{}])]}
    path.write_text(json.dumps(values | changes))
    with pytest.raises(WeightSyncError, match=rf"{path}: not the manifest of a weight update \({found}"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(
        WeightSyncError, match=r"not the manifest of a weight update \(no such file\); update again"
    ):
        read_manifest(tmp_path)
