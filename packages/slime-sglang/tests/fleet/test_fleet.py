"""The fleet over fake workers: load balancing, and faults that a real server does not show on request."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import SamplingParams

from ..fake_fleet import (
    HANGING,
    PARAMS,
    PROMPTS,
    WATCHED,
    generate_all,
    right,
    run_fleet,
    tokens_so_far,
    until,
)

pytestmark = pytest.mark.timeout(120)


def test_requests_at_once_are_spread_evenly(fleet_of):
    async def scenario(engine, first, second):
        assert right(await generate_all(engine))
        return len(first.answered), len(second.answered)

    assert fleet_of(scenario) == (6, 6)


def test_a_completion_names_the_replica_that_generated_it(fleet_of):
    async def scenario(engine, first, second):
        answers = {
            tuple(prompt): (await engine.generate(prompt, PARAMS)).metadata["replica"] for prompt in PROMPTS
        }
        asked = {"engine 0": first.answered, "engine 1": second.answered}
        return all(list(prompt) in [list(one) for one in asked[name]] for prompt, name in answers.items())

    assert fleet_of(scenario)


def test_requests_of_a_session_go_to_one_engine(fleet_of):
    async def scenario(engine, first, second):
        for prompt in PROMPTS:
            await engine.generate(prompt, PARAMS, session_id="a session")
        return sorted([len(first.answered), len(second.answered)])

    assert fleet_of(scenario) == [0, len(PROMPTS)]


def test_an_abort_ends_what_waits_and_what_is_in_flight(fleet_of):
    async def scenario(engine, first, second):
        first.hold.clear()
        second.hold.clear()
        work = asyncio.create_task(generate_all(engine))
        await until(lambda: first.asked.count("/generate") + second.asked.count("/generate") == len(PROMPTS))
        await engine.abort()
        await work
        return "/abort_request" in first.asked, "/abort_request" in second.asked

    assert fleet_of(scenario) == (True, True)


def test_an_abort_ends_what_waits_for_an_engine_to_be_checked(fleet_of):
    async def scenario(engine, first, second):
        for worker in (first, second):
            worker.faults |= {"/generate": 500, "/health_generate": "hang"}
        work = asyncio.create_task(generate_all(engine))
        await until(lambda: "/health_generate" in first.asked and "/health_generate" in second.asked)
        await engine.abort()
        return [answer.finish_reason for answer in await work]

    assert fleet_of(scenario, **WATCHED) == ["abort"] * len(PROMPTS)


@pytest.mark.parametrize("fault", [500, 503, "torn", "cut", "nonsense"])
def test_what_one_engine_fails_at_another_answers_and_none_twice(fleet_of, fault):
    async def scenario(engine, first, second):
        first.faults["/generate"] = fault
        assert right(await generate_all(engine))
        assert first.answered == []
        assert sorted(second.answered) == sorted(PROMPTS)
        await until(lambda: "/health_generate" in first.asked)  # it is suspected, and checked at once
        first.faults.clear()
        await until(lambda: not engine._replicas[0].engine.suspected.is_set())
        assert right(await generate_all(engine))
        assert len(first.answered) == len(PROMPTS) // 2  # nothing was wrong with it, so it was kept

    fleet_of(scenario, **WATCHED)


@pytest.mark.parametrize("fault", ["torn", "cut", "nonsense", "end", "hang"])
def test_a_response_goes_on_elsewhere_from_the_tokens_that_arrived(fleet_of, fault):
    async def scenario(engine, first, second):
        first.faults_within, second.version = [fault] * len(PROMPTS), "5"
        if fault == "hang":
            first.faults["/health_generate"] = "hang"
        answers = await generate_all(engine)
        assert right(answers)
        assert {tuple(answer.log_probs) for answer in answers} == {(-2.0, -3.0, -4.0)}
        lost = [answer for answer in answers if len(answer.metadata["weight_versions"]) > 1]
        assert len(lost) == len(PROMPTS) // 2
        assert lost[0].metadata["weight_versions"] == [
            {"version": "initial", "start": 0, "end": 1},
            {"version": "5", "start": 1, "end": 3},
        ]
        assert {answer.weight_version for answer in answers} == {"5"}
        assert first.answered == []
        return sorted(
            (len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]) for body in second.bodies
        )

    assert fleet_of(scenario, **HANGING if fault == "hang" else WATCHED) == [(2, 3)] * 6 + [(3, 2)] * 6


def test_behind_a_router_a_response_goes_on_from_the_tokens_that_arrived(fleet_of):
    async def scenario(engine, first, second):
        for worker in (first, second):
            worker.faults_within = ["cut"]
            worker.break_off.clear()
        tasks = [asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in PROMPTS]
        await until(lambda: sum(task.done() for task in tasks) == len(PROMPTS) - 2)
        cut = [task for task in tasks if not task.done()]
        await until(
            lambda: all(tokens_so_far(task) for task in cut)
        )  # the router may drop what it has in hand
        for worker in (first, second):
            worker.break_off.set()
        answers = await asyncio.gather(*tasks)
        assert right(answers)
        assert {tuple(answer.log_probs) for answer in answers} == {(-2.0, -3.0, -4.0)}
        return sorted(len(body["input_ids"]) for body in first.bodies + second.bodies)

    assert fleet_of(scenario, routed="round_robin", **WATCHED) == [2] * 12 + [3] * 2


def test_a_stop_string_that_two_engines_share_ends_the_response(fleet_of):
    async def scenario(engine, first, second):
        first.faults_within = ["cut"]
        params = SamplingParams(max_new_tokens=8, min_new_tokens=2, stop=("bb",), seed=7)
        answer = await engine.generate([0, 1], params)  # every token is a b
        (body,) = second.bodies
        assert body["sampling_params"]["max_new_tokens"] == 7
        assert (body["sampling_params"]["min_new_tokens"], body["sampling_params"]["sampling_seed"]) == (1, 7)
        assert answer.metadata["weight_versions"] == [{"version": "initial", "start": 0, "end": 2}]
        return answer.tokens, answer.log_probs, answer.finish_reason

    assert fleet_of(scenario, **WATCHED) == ([1, 1], [-2.0, -3.0], "stop")


def test_a_response_goes_on_elsewhere_with_the_same_images(tmp_path):
    async def scenario(engine, first, second):
        first.faults_within = ["cut"]
        answer = await engine.generate([5, 7, 6], PARAMS, images=[str(tmp_path / "a.png")])
        assert answer.tokens == [12, 12, 12]
        return [(body["input_ids"], body["image_data"]) for body in first.bodies + second.bodies]

    (tmp_path / "a.png").write_bytes(b"\0\0\0")
    (tmp_path / "config.json").write_text('{"image_token_id": 7}')
    seen = ["data:image;base64,AAAA"]
    assert run_fleet(tmp_path, tmp_path, scenario, **WATCHED) == [([5, 7, 6], seen), ([5, 7, 6, 12], seen)]


def test_images_do_not_go_through_a_router(fleet_of):
    async def scenario(engine, first, second):
        with pytest.raises(EngineError, match="images do not go through a router"):
            await engine.generate([5, 7, 6], PARAMS, images=["data:image;base64,AAAA"])

    fleet_of(scenario, routed="round_robin")


def test_an_abort_answers_with_what_arrived_of_a_response_that_waits_for_an_engine(fleet_of):
    async def scenario(engine, first, second):
        for worker in (first, second):
            worker.faults_within = ["cut"]
            worker.faults["/health_generate"] = "hang"
        work = asyncio.create_task(engine.generate([0, 1], PARAMS))
        await until(lambda: "/health_generate" in first.asked and "/health_generate" in second.asked)
        await engine.abort()
        answer = await work
        return answer.tokens, answer.log_probs, answer.finish_reason

    assert fleet_of(scenario, **WATCHED) == ([1, 1], [-2.0, -3.0], "abort")


@pytest.mark.parametrize("watched", [True, False])
def test_streams_are_for_those_who_go_on_with_them_and_servers_that_send_each_token_once(fleet_of, watched):
    async def scenario(engine, first, second):
        engine._replicas[1].engine.can_stream = False
        assert right(await generate_all(engine))
        return {body["stream"] for body in first.bodies}, {body["stream"] for body in second.bodies}

    assert fleet_of(scenario, **WATCHED if watched else {}) == ({watched}, {False})


def test_a_closed_port_is_taken_out_and_its_requests_are_answered_elsewhere(fleet_of):
    async def scenario(engine, first, second):
        await first.stop()
        assert right(await generate_all(engine))
        await until(lambda: engine._replicas[0].state == "gone")
        asked = len(first.asked)
        assert right(await generate_all(engine))
        assert len(first.asked) == asked
        assert len(second.answered) == 2 * len(PROMPTS)

    fleet_of(scenario, **WATCHED)


def test_a_hung_engine_is_taken_out_within_interval_and_deadline(fleet_of):
    async def scenario(engine, first, second):
        first.faults |= {"/generate": "hang", "/health_generate": "hang"}
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert right(await generate_all(engine))
        assert engine._replicas[0].state == "gone"
        assert "failed its health check" in engine._replicas[0].reason
        return loop.time() - begin

    assert (
        5.2 <= fleet_of(scenario, **HANGING) < 60
    )  # without checks it would be the request's deadline, an hour


def test_a_slow_answer_is_waited_for_where_the_engine_is_healthy(fleet_of):
    async def scenario(engine, first, second):
        first.hold.clear()
        work = asyncio.create_task(generate_all(engine))
        await until(lambda: first.asked.count("/health_generate") >= 3)
        first.hold.set()
        assert right(await work)
        assert len(first.answered) == len(second.answered)

    fleet_of(scenario, **WATCHED | {"rollout_health_check_interval": 0.1})


def test_what_an_engine_refuses_is_asked_of_no_other(fleet_of):
    async def scenario(engine, first, second):
        first.faults["/generate"] = second.faults["/generate"] = 400
        with pytest.raises(EngineError, match="status 400"):
            await engine.generate([1], PARAMS)
        return first.asked.count("/generate") + second.asked.count("/generate")

    assert fleet_of(scenario, **WATCHED) == 1


def test_a_request_that_three_engines_fail_at_is_given_up(fleet_of):
    async def scenario(engine, first, second):
        first.faults["/generate"] = second.faults["/generate"] = 500
        with pytest.raises(EngineError, match="status 500") as caught:
            await engine.generate([1], PARAMS)
        assert caught.value.__notes__ == ["3 engines in turn failed at this request"]
        return first.asked.count("/generate") + second.asked.count("/generate")

    assert fleet_of(scenario, **WATCHED) == 3


def test_with_no_engine_left_requests_end_with_what_became_of_each(fleet_of):
    async def scenario(engine, first, second):
        await first.stop()
        await second.stop()
        with pytest.raises(EngineError) as caught:
            for _ in range(5):
                await generate_all(engine)
        return str(caught.value)

    message = fleet_of(scenario, **WATCHED)
    assert message.startswith("no engine is left to generate:\nengine 0: it failed its health check")
    assert "engine 1: it failed its health check" in message


def test_without_fault_tolerance_the_first_failure_is_the_callers(fleet_of):
    async def scenario(engine, first, second):
        first.faults["/generate"] = 500
        with pytest.raises(EngineError, match="status 500"):
            await generate_all(engine)
        return second.faults

    fleet_of(scenario)


def test_moves_reach_all_engines(fleet_of):
    async def scenario(engine, first, second):
        for move in (engine.pause, engine.resume, engine.offload, engine.onload):
            await move()
        return first.asked[-5:], second.asked[-5:]

    moves = ["/pause_generation", "/continue_generation"]
    moves += ["/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"]
    assert fleet_of(scenario) == (moves, moves)


def test_a_paused_engine_is_not_asked_to_generate_for_its_health(fleet_of):
    async def scenario(engine, first, second):
        await engine.pause()
        first.faults["/health_generate"] = "hang"
        n = first.asked.count("/model_info")
        await until(lambda: first.asked.count("/model_info") >= n + 3)
        return engine._replicas[0].state

    assert fleet_of(scenario, **WATCHED | {"rollout_health_check_interval": 0.1}) == "serving"


def test_behind_a_router_load_spreads_and_a_closed_port_is_taken_out(fleet_of):
    async def scenario(engine, first, second):
        assert right(await generate_all(engine))
        assert (len(first.answered), len(second.answered)) == (6, 6)
        await first.stop()
        assert right(await generate_all(engine))
        await until(lambda: engine._replicas[0].state == "gone")
        assert len(second.answered) == 6 + len(PROMPTS)
        return [worker["url"] for worker in await engine._router._workers()] == [f"http://{second.address}"]

    assert fleet_of(scenario, routed="round_robin", **WATCHED | {"rollout_health_check_interval": 0.2})


def test_behind_a_router_an_abort_ends_what_is_in_flight(fleet_of):
    async def scenario(engine, first, second):
        first.hold.clear()
        second.hold.clear()
        work = asyncio.create_task(generate_all(engine))
        await until(lambda: first.asked.count("/generate") + second.asked.count("/generate") == len(PROMPTS))
        await engine.abort()
        await work
        return "/abort_request" in first.asked, "/abort_request" in second.asked

    assert fleet_of(scenario, routed="round_robin") == (True, True)
