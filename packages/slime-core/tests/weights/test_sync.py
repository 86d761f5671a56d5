"""Weight sync: both sides under one deadline, and an error of either is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from slime_core.config.sections import TrainSection
from slime_core.errors import DeadlineError, DeltaBaseError, ReceiverLostError, WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import EngineCapabilities, TrainerCapabilities, TransferPlan
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.weights.sync import (
    Agreement,
    choose_transport,
    sync_weights,
    transport_problems,
    wanted_transport,
)


def side(action, **more):
    """Return a trainer or an engine whose part of the update is `action`."""

    async def run(plan):
        return await action()

    async def open_update(transport, version):
        return SimpleNamespace(transport=transport, version=version)

    return SimpleNamespace(
        capabilities=TrainerCapabilities(transports=("memory",)),
        send=run,
        receive=run,
        open_update=open_update,
        **more,
    )


def sync(send, receive, *, timeout_s=30.0):
    return asyncio.run(sync_weights(side(send), side(receive), version="7", timeout_s=timeout_s))


async def agree():
    return {"w": 1}


def test_the_deadline_is_of_the_update_and_not_of_the_start_of_those_who_receive_it():
    started = asyncio.Event()
    engine = side(agree)
    opened = engine.open_update

    async def open_once_started(transport, version):
        await started.wait()
        return await opened(transport, version)

    engine.open_update = open_once_started

    async def main():
        asyncio.get_running_loop().call_later(50, started.set)
        return await sync_weights(side(agree), engine, version="7", timeout_s=10)

    assert run_in_virtual_time(main()) == ("memory", 50)


def test_receivers_that_never_start_are_not_waited_for_without_end():
    engine = side(agree)
    engine.open_update = lambda transport, version: asyncio.Event().wait()
    told = r"weight sync to version 7 by memory: receivers that start: not done after 14400 s"
    with pytest.raises(DeadlineError, match=told):
        run_in_virtual_time(sync_weights(side(agree), engine, version="7", timeout_s=10))


def test_a_side_that_waits_is_cancelled_when_the_other_fails():
    cancelled = []

    async def wait():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def refuse():
        raise WeightSyncError("w: wrong shape")

    with pytest.raises(WeightSyncError, match="w: wrong shape"):
        sync(wait, refuse)
    assert cancelled == [True]


def test_failures_of_both_sides_are_told():
    async def refuse():
        raise WeightSyncError("w: wrong shape")

    async def break_down():
        raise OSError("pipe closed")

    with pytest.raises(WeightSyncError, match="w: wrong shape") as caught:
        sync(refuse, break_down)
    assert caught.value.__notes__ == ["the other side failed, too: OSError: pipe closed"]


def test_a_side_that_hangs_misses_the_deadline():
    with pytest.raises(DeadlineError, match=r"weight sync to version 7 by memory: not done after 0\.1 s"):
        sync(agree, asyncio.Event().wait, timeout_s=0.1)


def test_different_fingerprints_are_refused_by_name():
    async def other():
        return {"w": 2, "v": 3}

    with pytest.raises(WeightSyncError, match=r"2 of 1 .*: v \(not sent\), w \(differs\)"):
        sync(agree, other)


def test_a_delta_that_does_not_fit_is_followed_by_one_that_does():
    calls = []

    async def receive():
        calls.append(1)
        if len(calls) == 1:
            raise DeltaBaseError("of other weights")
        return await agree()

    assert sync(agree, receive) == "memory"
    assert len(calls) == 2


def test_a_delta_that_never_fits_is_an_error():
    calls = []

    async def receive():
        calls.append(1)
        raise DeltaBaseError("of other weights")

    with pytest.raises(DeltaBaseError, match="of other weights"):
        sync(agree, receive)
    assert len(calls) == 2


def test_an_update_of_which_a_receiver_is_lost_comes_to_the_senders_end_and_is_sent_again():
    calls, ends, lost = [], [], asyncio.Event()

    async def send():
        if not ends:
            await lost.wait()
            await asyncio.sleep(0)
        ends.append(True)
        return {"w": 1}

    async def receive():
        calls.append(1)
        if len(calls) == 1:
            lost.set()
            raise ReceiverLostError("server 1 was lost during it")
        return {"w": 1}

    assert sync(send, receive) == "memory"
    assert len(ends) == len(calls) == 2


def test_an_update_of_which_receivers_are_lost_again_and_again_is_an_error():
    calls = []

    async def receive():
        calls.append(1)
        raise ReceiverLostError(f"server {len(calls)} was lost during it")

    with pytest.raises(ReceiverLostError, match="server 5 was lost"):
        sync(agree, receive)


@pytest.mark.parametrize(
    "ends",
    [
        ["base", "lost"],
        ["base", "lost", "base"],  # of who came in its place
        ["lost", "base", "lost"],
        ["base", "lost", "base", "lost", "base", "lost", "base", "lost", "base"],
    ],
)
def test_a_receiver_that_is_lost_while_all_weights_are_sent_in_the_place_of_a_delta_has_it_sent_again(ends):
    errors = {"base": DeltaBaseError("of other weights"), "lost": ReceiverLostError("a server was lost")}
    left = [errors[end] for end in ends]

    async def receive():
        if left:
            raise left.pop(0)
        return await agree()

    assert sync(agree, receive) == "memory"
    assert left == []


def test_all_weights_are_asked_for_once_in_a_row_and_five_losses_are_too_many():
    calls = []

    async def receive():
        calls.append(1)
        if len(calls) % 2:
            raise DeltaBaseError(f"base {len(calls)}")
        raise ReceiverLostError(f"server {len(calls)} was lost")

    with pytest.raises(ReceiverLostError, match="server 10 was lost"):
        sync(agree, receive)


def lists(*transports, **others):
    return SimpleNamespace(capabilities=EngineCapabilities(transports=transports, **others))


def test_the_engines_best_transport_is_taken_unless_one_is_wanted():
    trainer, engine = lists("disk", "memory"), lists("memory", "distributed", "disk")
    assert choose_transport(trainer, engine) == "memory"
    assert choose_transport(trainer, engine, "disk") == "disk"
    with pytest.raises(
        WeightSyncError, match=r"transport distributed: the engine receives .*by \['disk', 'memory'\]"
    ):
        choose_transport(trainer, engine, "distributed")


def test_a_side_that_takes_others_takes_what_is_wanted_and_prefers_its_own():
    trainer, engine = lists("disk", other_transports=True), lists("memory", "disk", other_transports=True)
    assert choose_transport(trainer, engine) == "memory"
    assert choose_transport(trainer, engine, "pigeon") == "pigeon"
    with pytest.raises(WeightSyncError, match=r"pigeon: .*\['memory', 'disk'\] and others .* by \['disk'\];"):
        choose_transport(lists("disk"), engine, "pigeon")


@pytest.mark.parametrize(
    ("transport", "mode", "wanted"),
    [
        (None, "full", None),
        ("disk", "full", "disk"),
        ("disk", "delta", "disk-delta"),
        (None, "delta", "disk-delta"),
        ("memory", "delta", "memory-delta"),
    ],
)
def test_flags_name_the_transport(transport, mode, wanted):
    section = TrainSection(update_weight_transport=transport, update_weight_mode=mode)
    assert wanted_transport(section) == wanted
    capabilities = EngineCapabilities(transports=("memory", "disk", "disk-delta"))
    problems = list(transport_problems(section, "engine e", capabilities, Registry([])))
    assert [problem.found for problem in problems] == (
        ["memory-delta, which the engine e lacks"] if wanted == "memory-delta" else []
    )


def plan(version, channel=None):
    return TransferPlan(transport="memory", version=version, dtype="float32", channel=channel or object())


def test_only_the_update_agreed_on_last_is_taken_and_once():
    agreement = Agreement()
    old, again, new = plan("7"), plan("7"), plan("8")
    with (
        pytest.raises(WeightSyncError, match="version 7: the engine has agreed on no update"),
        agreement.taking(old),
    ):
        pass
    agreement.open(old)
    agreement.open(again)
    with pytest.raises(WeightSyncError, match="version 7: the engine has agreed on this version anew"):
        agreement.taking(old).__enter__()
    agreement.open(new)
    with pytest.raises(WeightSyncError, match="version 7: the engine has agreed on version 8"):
        agreement.taking(again).__enter__()
    with agreement.taking(new):
        agreement.open(again)
        with pytest.raises(WeightSyncError, match="version 7: another one is in flight"):
            agreement.taking(again).__enter__()
    with agreement.taking(again):
        pass
    with pytest.raises(WeightSyncError, match=r"version 8: .*or has taken it already"):
        agreement.taking(new).__enter__()
