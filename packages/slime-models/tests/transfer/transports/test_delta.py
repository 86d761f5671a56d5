"""Transport `disk-delta`: changes of tensors, and to whom they are sent."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.changes import CHANGES, apply_changes, encode_changes
from slime_models.transfer.manifest import read_manifest
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports.delta import DeltaChannel

from ..updates import bits, plan_of, send, tensors


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("n_changed", [0, 1, 7, 70_001])
def test_applied_changes_give_the_new_tensor(encoding, dtype, n_changed):
    old = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = old.clone()
    places = torch.randperm(len(old), generator=torch.Generator().manual_seed(2))[:n_changed]
    view = bits(new).view(-1, dtype.itemsize)
    view[places, 0] ^= 3  # whatever the number was, it is another now
    data, counted = encode_changes(old, new, encoding)
    assert counted == n_changed
    apply_changes(old, data, n_changed=counted, encoding=encoding, name="w")
    assert torch.equal(bits(old), bits(new))


def test_changes_of_one_element_are_few_bytes():
    old = torch.zeros(1_000_000, dtype=torch.bfloat16)
    new = old.clone()
    new[999_999] = 1.0
    data, counted = encode_changes(old, new, "xor")
    assert counted == 1
    assert len(data) < 30


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "of a longer tensor"])
def test_damaged_changes_are_refused_by_name_and_nothing_is_written(damage):
    old, new = torch.zeros(100), torch.arange(100.0)
    data, counted = encode_changes(old, new, "xor")
    if damage == "flipped":
        data = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    elif damage == "cut":
        data = data[:-1]
    elif damage == "gone":
        data = b""
    else:
        data, counted = encode_changes(torch.zeros(200), torch.arange(200.0), "xor")
    with pytest.raises(WeightSyncError, match=r"model\.w: the changes that arrived are damaged"):
        apply_changes(old, data, n_changed=counted, encoding="xor", name="model.w")
    assert not old.any()


def test_changes_go_only_to_a_receiver_that_holds_what_was_sent_last(tmp_path):
    sender, values = WeightSender(asyncio.to_thread, Registry()), tensors(1)

    def sent(number, base, new):
        folder = tmp_path / str(number)
        send(sender, plan_of("disk-delta", DeltaChannel(folder=folder, base=base, encoding="xor")), new)
        return read_manifest(folder), (folder / CHANGES).stat().st_size

    first, n_bytes = sent(1, None, values)
    assert (first.base, n_bytes) == (None, (15 + 130) * 4)
    values["c"][5] += 1
    second, n_bytes = sent(2, first.digest, values)
    assert (second.base, n_bytes < 40) == (first.digest, True)
    assert [entry.n_changed for entry in second.entries] == [0, 0, 1]
    third, n_bytes = sent(3, first.digest, values)  # not what was sent last
    assert (third.base, n_bytes) == (None, (15 + 130) * 4)
