"""Transport `distributed-delta`: changes through the group, and to whom they are sent."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from slime_core.errors import DeltaBaseError, WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.tensor_spec import Spec
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.staging import StagedTensors
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transports.broadcast_delta import TRANSPORT

from ..updates import SHAPES, buckets, plan_of, tensors


@pytest.fixture
def storage(tmp_path):
    storage = UpdateStorage(
        specs={name: Spec(shape=shape, dtype="float32") for name, shape in SHAPES.items()},
        model_path=tmp_path, staging_dir=tmp_path, disk_dir=tmp_path / "disk", keep_files=False, encoding="xor", timeout_s=60,
    )  # fmt: skip
    yield storage
    storage.close()


@pytest.fixture
def update(storage):
    """Returns a function that sends values by one sender: (outcome of the receiver, bytes sent)."""
    receiver, sender = TRANSPORT.create_receiver(storage), WeightSender(asyncio.to_thread, Registry())

    async def both(version, values, change):
        plan = plan_of("distributed-delta", change(receiver.open(version)), version)
        sent, update = await asyncio.gather(
            sender.send(plan, buckets(values)), receiver.arrive(plan), return_exceptions=True
        )
        assert not isinstance(sent, BaseException), sent
        return update, sender.last_bytes

    return lambda version, values, change=lambda channel: channel: asyncio.run(both(version, values, change))


def test_only_changes_go_to_a_receiver_that_holds_what_was_sent_last(storage, update):
    values = tensors(1)
    first, n_bytes = update("1", values)
    assert (first.manifest.base, n_bytes) == (None, (15 + 130) * 4)
    values["c"][5] += 1
    second, n_bytes = update("2", values)
    assert 0 < n_bytes < 40
    staged = StagedTensors(second.folder)
    assert staged.damaged() == []
    assert all(staged.tensor(name).equal(tensor) for name, tensor in values.items())
    storage.forget()  # an update failed, so that what is there is not known
    third, n_bytes = update("3", values)
    assert n_bytes == (15 + 130) * 4
    assert StagedTensors(third.folder).damaged() == []


def test_changes_to_other_weights_are_refused_and_all_weights_follow(storage, update):
    values = tensors(1)
    first, _ = update("1", values)
    values["a"][0] = torch.zeros(5)
    digest = first.manifest.digest

    def another(channel):  # the engine's weights become others after it has said which it holds
        storage.staging.begin("another")
        storage.staging.put(list(tensors(2).items()), {})
        storage.staging.seal()
        return dataclasses.replace(channel, base=digest)

    refused, _ = update("2", values, another)
    assert isinstance(refused, DeltaBaseError)
    held = StagedTensors(storage.staging.folder)
    assert all(held.tensor(name).equal(tensor) for name, tensor in tensors(2).items())
    after, n_bytes = update("2", values)
    assert n_bytes == (15 + 130) * 4
    assert StagedTensors(after.folder).tensor("a").equal(values["a"])


def test_a_tensor_that_the_model_lacks_is_named_and_the_sender_is_not_at_fault(storage, update):
    refused, _ = update("1", {"more": torch.ones(3)} | tensors(1))
    assert isinstance(refused, WeightSyncError)
    assert str(refused).startswith("update to version 1: more: the engine's model has no such tensor")
