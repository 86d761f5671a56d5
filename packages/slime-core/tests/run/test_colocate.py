"""Devices that trainer and engine share: who has what in which turn."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from slime_core.config.sections import ClusterSection
from slime_core.protocols import TrainerCapabilities
from slime_core.run.colocate import SharedDevices


class Part:
    """Notes what it is asked to do, as `name.method`."""

    def __init__(self, name, log, **capabilities):
        self._name, self._log = name, log
        self.capabilities = TrainerCapabilities(**capabilities)

    def __getattr__(self, method):
        async def noted():
            self._log.append(f"{self._name}.{method}")

        return noted


def calls(*turns, offloads_weights=True, **section):
    """What is asked of both in each of several turns; an update brings weights."""
    log = []
    devices = SharedDevices(
        Part("trainer", log, offloads_weights=offloads_weights), Part("engine", log), ClusterSection(**section),
        timeout_s=10, during=lambda name: contextlib.nullcontext(),
    )  # fmt: skip

    async def scenario():
        found = []
        for turn in turns:
            log.clear()
            await getattr(devices, f"for_{turn}")()
            if turn == "update":
                devices.weights_arrived()
            found.append(list(log))
        return found

    return asyncio.run(scenario())


def test_for_its_last_checkpoint_a_run_closes_the_engine_that_may_hang():
    *_, saves = calls("engine", "update", "engine", "last_save", colocate=True)
    assert saves == ["engine.close", "trainer.onload"]
    *_, saves = calls("engine", "update", "engine", "trainer", "last_save", colocate=True)
    assert saves == []  # the engine is out already
    *_, saves = calls("engine", "update", "engine", "last_save")
    assert saves == []  # and has devices of its own


def test_the_weights_of_both_are_there_at_an_update_alone():
    """From the start of a run: the engine starts, gets weights and generates; then a step of training, and so on."""
    start, first, generates, trains, update, again = calls(
        "engine", "update", "engine", "trainer", "update", "engine", colocate=True
    )
    assert start == ["trainer.offload", "trainer.offload_weights"]
    assert first == ["engine.offload", "trainer.onload_weights", "engine.onload"]  # its KV cache had the room
    assert generates == ["trainer.offload_weights"]
    assert trains == ["engine.offload", "trainer.onload"]
    assert update == ["trainer.offload", "engine.onload"]  # the trainer's weights have not left
    assert again == ["trainer.offload_weights"]


def test_a_trainer_that_cannot_offload_its_weights_keeps_them():
    turns = ("engine", "update", "engine", "trainer", "update")
    assert calls(*turns, offloads_weights=False, colocate=True) == [
        ["trainer.offload"], [], [], ["engine.offload", "trainer.onload"], ["trainer.offload", "engine.onload"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({}, [[], [], [], []]),
        ({"offload_train": True}, [["trainer.offload"], [], ["trainer.onload"], ["trainer.offload"]]),
        ({"offload_rollout": True}, [[], [], ["engine.offload"], ["engine.onload"]]),
    ],
)
def test_the_trainers_weights_stay_where_the_engine_does_not_make_room(section, wanted):
    assert calls("engine", "update", "trainer", "update", **section) == wanted
