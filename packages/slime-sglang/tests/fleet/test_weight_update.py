"""Updates of the weights of a fleet, over servers of the test's own: who has which when one of them fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from slime_core.errors import EngineError, WeightSyncError
from slime_core.weights.sync import sync_weights
from slime_models.groups import OWN_TRANSPORTS

from ..fake_fleet import HANGING, PARAMS, PROMPTS, WATCHED, generate_all, right, until
from ..sender import Sender

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def sender():
    import torch

    return Sender({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)})


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_updates_reach_every_engine_and_the_fingerprint_is_theirs(fleet_of, sender, transport):
    async def scenario(engine, first, second):
        for version in ("5", "6"):
            await sync_weights(sender, engine, version=version, timeout_s=60, transport=transport)
            answers = await generate_all(engine)
            assert {answer.weight_version for answer in answers} == {version}
        return first.version, second.version, engine.weight_version

    assert fleet_of(scenario) == ("6", "6", "6")


@pytest.mark.parametrize("transport", ["memory", "nccl"])
def test_sglang_loads_an_update_into_the_model_and_into_no_draft_model(fleet_of, sender, transport):
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    async def scenario(engine, first, second):
        await sync_weights(sender, engine, version="5", timeout_s=60, transport=transport)
        return first.update_bodies

    requests = {
        "/begin_weight_update": io_struct.BeginWeightUpdateReqInput,
        "/update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
    }
    model, draft = (
        SimpleNamespace(weight_update_runners=lambda role=role: [(role, None)])
        for role in ("target", "draft")
    )
    sglangs = SimpleNamespace(tp_worker=model, draft_worker=draft)
    called = [
        (path, role)
        for path, body in fleet_of(scenario)
        for role, _ in SchedulerWeightUpdaterManager._select_runners(sglangs, requests[path](**body).selector)
    ]
    assert ("/begin_weight_update", "target") in called
    assert ("/update_weights_from_tensor", "target") in called
    assert {role for _, role in called} == {"target"}


@pytest.mark.parametrize("transport", ["memory", "nccl"])
@pytest.mark.parametrize("fault", [500, "torn", "hang"])
@pytest.mark.parametrize(
    "path", ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
)
def test_an_engine_that_fails_at_an_update_is_lost_and_the_others_have_it(
    fleet_of, sender, path, fault, transport
):
    async def scenario(engine, first, second):
        first.faults |= {path: fault} | ({"/model_info": "hang"} if fault == "hang" else {})
        await sync_weights(sender, engine, version="5", timeout_s=60, transport=transport)
        assert right(await generate_all(engine))
        assert len(second.answered) == len(PROMPTS)
        await until(lambda: engine._replicas[0].state == "gone")
        return second.version

    assert fleet_of(scenario, **HANGING if fault == "hang" else WATCHED) == "5"


def test_without_fault_tolerance_an_engine_that_fails_at_an_update_fails_it(fleet_of, sender):
    async def scenario(engine, first, second):
        first.faults["/update_weights_from_tensor"] = 500
        with pytest.raises(EngineError, match="status 500"):
            await sync_weights(sender, engine, version="5", timeout_s=60)
        return engine.weight_version

    assert fleet_of(scenario) == "initial"


def test_an_update_that_one_engine_refuses_is_served_by_none(fleet_of, sender):
    async def scenario(engine, first, second):
        first.refusal = "a: the bytes that arrived are not those that were sent"
        with pytest.raises(WeightSyncError, match="version 5: a: the bytes that arrived"):
            await sync_weights(sender, engine, version="5", timeout_s=60)
        with pytest.raises(EngineError, match="had loaded the update to version 5, which failed"):
            await engine._replicas[1].engine.generate([1], PARAMS)
        return (await engine._replicas[0].engine.generate([1], PARAMS)).weight_version

    assert fleet_of(scenario) == "initial"


def test_an_engine_that_holds_something_else_after_an_update_is_found(fleet_of, sender):
    async def scenario(engine, first, second):
        second.spoils = True
        with pytest.raises(
            WeightSyncError, match=r"2 of 2 tensors are not the trainer's: a \(differs\)"
        ) as caught:
            await sync_weights(sender, engine, version="5", timeout_s=60)
        return caught.value.__notes__

    assert fleet_of(scenario) == ["found by engine 1"]


@pytest.mark.parametrize("transport", OWN_TRANSPORTS)
def test_an_engine_that_takes_anothers_place_has_the_newest_weights(fleet_of, sender, transport):
    async def scenario(engine, first, second, spare):
        for version in ("5", "6"):
            sender.tensors["a"] += 1
            await sync_weights(sender, engine, version=version, timeout_s=60, transport=transport)
        await first.stop()
        assert right(await generate_all(engine))
        await until(lambda: spare.version == "6" and engine._replicas[0].state == "serving")
        return {answer.weight_version for answer in await generate_all(engine)}, len(spare.answered)

    assert fleet_of(scenario, spare=True, **WATCHED) == ({"6"}, len(PROMPTS) // 2)


@pytest.mark.parametrize(("transport", "becomes"), [("disk", "serving"), ("memory", "gone")])
def test_after_an_update_that_failed_only_weights_that_are_still_staged_are_given(
    fleet_of, sender, transport, becomes
):
    async def scenario(engine, first, second, spare):
        await sync_weights(sender, engine, version="5", timeout_s=60, transport=transport)
        sender.tensors["c"] = sender.tensors.pop("b")
        with pytest.raises(WeightSyncError, match="c: the engine's model has no such tensor"):
            await sync_weights(sender, engine, version="6", timeout_s=60, transport=transport)
        await first.stop()
        assert right(await generate_all(engine))
        replica = engine._replicas[0]
        await until(lambda: replica.state == becomes and replica.engine.url.endswith(spare.address))
        return spare.version, "no weights are staged to give it" in replica.reason

    wanted = ("5", False) if becomes == "serving" else ("initial", True)
    assert fleet_of(scenario, spare=True, **WATCHED) == wanted


def test_a_server_that_somebody_starts_anew_is_not_taken_for_one_with_the_newest_weights(fleet_of, sender):
    async def scenario(engine, first, second):
        await sync_weights(sender, engine, version="5", timeout_s=60)
        first.version = "default"
        with pytest.raises(EngineError, match="weights that it started with, and should have version 5"):
            await generate_all(engine)

    fleet_of(scenario, **WATCHED)


def test_a_wrong_tensor_is_refused_before_any_engine_is_told(fleet_of, sender):
    async def scenario(engine, first, second):
        sender.tensors["c"] = sender.tensors.pop("b")
        with pytest.raises(WeightSyncError, match="c: the engine's model has no such tensor"):
            await sync_weights(sender, engine, version="5", timeout_s=60)
        return {"/pause_generation"} & {*first.asked, *second.asked}

    assert fleet_of(scenario, **WATCHED) == set()


def test_ranks_that_receive_an_update_themselves_have_it_all_and_one_that_holds_something_else_is_stopped(
    fleet_of, sender
):
    async def scenario(engine, first, second):
        for version in ("5", "6"):
            await sync_weights(sender, engine, version=version, timeout_s=60, transport="nccl")
            assert {answer.weight_version for answer in await generate_all(engine)} == {version}
            for worker in (first, second):
                held = dict(worker.model.named_parameters())
                assert all(held[name].equal(tensor) for name, tensor in sender.tensors.items())
        second.spoils = True
        with pytest.raises(WeightSyncError, match="version 7: a, b: the model does not hold what was sent"):
            await sync_weights(sender, engine, version="7", timeout_s=60, transport="nccl")
        for replica, why in zip(
            engine._replicas,
            ("had loaded the update to version 7, which failed", "its weights may be a mixture"),
            strict=True,
        ):
            with pytest.raises(EngineError, match=why):
                await replica.engine.generate([1], PARAMS)
        return first.version, second.version, engine.weight_version

    assert fleet_of(scenario, use_fault_tolerance=False) == ("7", "6", "6")


async def given_if_wanted(engine, sender, version):
    """Send weights as soon as the fleet asks for them, as a run does while it waits; returns the transport."""
    await engine.weights_wanted(version)
    return await sync_weights(sender, engine, version=version, timeout_s=60, transport="nccl")


def test_an_engine_that_takes_anothers_place_waits_for_weights_that_nobody_stages(fleet_of, sender):
    async def scenario(engine, first, second, spare):
        await sync_weights(sender, engine, version="5", timeout_s=60, transport="nccl")
        replica = engine._replicas[0]
        await first.stop()
        assert right(await generate_all(engine))
        await until(lambda: replica.state == "waiting")
        assert right(await generate_all(engine))
        assert (spare.version, spare.answered) == ("initial", [])
        paused = second.asked.count("/pause_generation")

        wanted = asyncio.create_task(engine.weights_wanted("6"))  # others serve: it is for the next update
        await asyncio.sleep(0)
        assert not wanted.done()
        wanted.cancel()
        await given_if_wanted(engine, sender, "5")
        assert replica.state == "serving"
        assert second.asked.count("/pause_generation") == paused  # the others go on
        assert spare.model.a.equal(sender.tensors["a"])
        assert {answer.weight_version for answer in await generate_all(engine)} == {"5"}

        await sync_weights(sender, engine, version="6", timeout_s=60, transport="nccl")
        return second.version, spare.version, len(spare.answered)

    assert fleet_of(scenario, spare=True, **WATCHED) == ("6", "6", len(PROMPTS) // 2)


def test_where_no_engine_has_weights_requests_wait_for_an_update_to_any_version(fleet_of, sender):
    async def scenario(engine, only, spare):
        await sync_weights(sender, engine, version="5", timeout_s=60, transport="nccl")
        await only.stop()
        asked = asyncio.create_task(generate_all(engine))
        await given_if_wanted(engine, sender, "6")
        return {answer.weight_version for answer in await asked}, spare.version

    assert fleet_of(scenario, roles=("regular",), spare=True, **WATCHED) == ({"6"}, "6")


def test_where_all_engines_are_lost_at_an_update_the_first_that_is_replaced_takes_it(fleet_of, sender):
    async def scenario(engine, only, spare):
        await sync_weights(sender, engine, version="5", timeout_s=60, transport="nccl")
        only.faults["/update_weights_from_tensor"] = "torn"
        await sync_weights(sender, engine, version="6", timeout_s=60, transport="nccl")
        return {answer.weight_version for answer in await generate_all(engine)}, spare.version

    assert fleet_of(scenario, roles=("regular",), spare=True, **WATCHED) == ({"6"}, "6")


def test_where_the_last_engine_is_lost_at_an_update_it_fails_by_name(fleet_of, sender):
    async def scenario(engine, first, second):
        for worker in (first, second):
            worker.faults["/update_weights_from_tensor"] = 500
        with pytest.raises(EngineError, match=r"no engine is left to generate:\nengine 0: .*status 500"):
            await sync_weights(sender, engine, version="5", timeout_s=60, transport="nccl")

    fleet_of(scenario, **WATCHED)
