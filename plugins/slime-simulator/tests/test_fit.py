"""Fitting: coefficients that are known come back, from schedules worked by hand and from what a replica really takes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from slime_core.errors import ConfigError
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_simulator.cli import options
from slime_simulator.costs.costs import Costs, EngineCosts, Slowdown, TrainerCosts
from slime_simulator.costs.fit import fit, fit_engine, fit_slowdown, fit_trainer, least_squares, schedule
from slime_simulator.costs.recorded import RecordedRun, Span, Step, read_run
from slime_simulator.parts.replica import SimulatedReplica, SimulatedRequest


def step(prompts, responses, generate_s=(), **metrics):
    named = {f"perf/{name}": value for name, value in metrics.items()}
    return Step(
        metrics=named, prompts=prompts, responses=responses, generate_s=list(generate_s), reward_s=[]
    )  # fmt: skip


def test_a_schedule_counts_steps_requests_and_tokens():
    """Two slots. Requests of 1 and 3 tokens on prompts of 10; the third, of 1 token, takes the place of the first.

    Step 1 over 10 + 10 tokens; step 2 over 11 of the second and 5 of the third; step 3 over 12.
    """
    found = schedule([10, 10, 5], [1, 3, 1], slots=2)
    assert found.tolist() == [[1, 2, 20, 20], [3, 5, 20 + 16 + 12, 25], [2, 4, 36, 25]]


def generate_s(costs, prompts, responses):
    async def work():
        loop, replica = asyncio.get_running_loop(), SimulatedReplica(costs)

        async def one(prompt, response):
            answer = loop.create_future()
            replica.submit(SimulatedRequest(response, prompt, lambda *_: answer.set_result(None)))
            await answer
            return loop.time()

        return await asyncio.gather(*map(one, prompts, responses))

    return run_in_virtual_time(work())[0]


def test_the_engines_coefficients_come_back():
    drawn, steps = random.Random(0), []
    costs = EngineCosts(step_s=0.01, request_s=2e-4, kv_token_s=3e-7, prefill_token_s=1e-5, slots=6)
    for _ in range(4):
        prompts = [drawn.randint(50, 300) for _ in range(20)]
        responses = [drawn.randint(1, 400) for _ in range(20)]
        steps.append(step(prompts, responses, generate_s(costs, prompts, responses)))
    found = fit_engine(steps, slots=6)
    assert vars(found) == pytest.approx(vars(costs), rel=1e-6)


def test_the_trainers_coefficients_come_back_with_what_is_between_the_phases():
    """2 s and 1 ms a token on 4 GPUs; each step has half a second more than its phases."""
    steps = []
    for tokens in (100, 400, 900):
        train = 2 + 0.001 * tokens / 4
        steps.append(
            step(
                [0],
                [tokens],
                train_time=train,
                rollout_time=7.0,
                update_weights_time=1.0,
                step_time=train + 8.5,
            )
        )
    found = fit_trainer(steps, gpus=4)
    assert (found.fixed_s, found.token_gpu_s) == pytest.approx((2.5, 0.001))


def test_steps_of_the_same_size_give_a_time_that_is_all_of_the_tokens():
    steps = [step([0], [100], train_time=5.0, step_time=5.0) for _ in range(3)]
    found = fit_trainer(steps, gpus=1)
    assert (found.fixed_s, found.token_gpu_s) == pytest.approx((0.0, 0.05))


def test_a_prompt_counts_once_for_its_samples_where_the_parts_share_it():
    """Two groups of two: 10 + 30 tokens of prompts, 6 of responses."""
    one = Step(
        metrics={}, prompts=[10, 10, 30, 30], responses=[1, 1, 2, 2], generate_s=[], reward_s=[], groups=[4, 4, 5, 5]
    )  # fmt: skip
    assert (one.tokens(shared=False), one.tokens(shared=True)) == (86, 46)
    found = schedule(one.prompts, one.responses, slots=4, prefills=one.prefills)
    assert found[:, 3].tolist() == [40, 40, 40, 40]


def test_the_engines_slowdowns_are_those_of_answers_that_came_beside_training():
    """Alone a decode step takes 1 s, and 0.5 s for each request; beside training 3 s and 0.75 s.

    Two steps of three requests take 10.5 s, a step of two 4.5 s; the last answer comes after training, whenever that is.
    """
    costs = Costs(
        engine=EngineCosts(step_s=1.0, request_s=0.5, slots=3),
        trainer=TrainerCosts(token_gpu_s=0.0, fixed_s=16.0),
    )
    one = Step(metrics={}, prompts=[0, 0, 0], responses=[2, 3, 4], generate_s=[10.5, 15.0, 99.0], reward_s=[])
    steps = [
        replace(one, train=Span(100, 116), generation=Span(0, 99)),
        replace(one, train=Span(300, 316), generation=Span(100, 199)),
    ]
    found = fit_slowdown(steps, costs, gpus=1)
    assert (found.step, found.request, found.trainer) == pytest.approx((3.0, 1.5, 1.0))


def test_training_that_overlaps_in_part_is_slowed_down_in_that_part():
    """4 s alone took 5 s, of which generation took 3: in the other 2 s half of it was done, and in 3 s the other half."""
    costs = Costs(engine=EngineCosts(step_s=1.0), trainer=TrainerCosts(token_gpu_s=0.0, fixed_s=4.0))
    empty = Step(metrics={}, prompts=[0], responses=[1], generate_s=[9.0], reward_s=[])
    steps = [
        replace(empty, train=Span(0, 5), generation=Span(-9, -1)),
        replace(empty, train=Span(10, 14), generation=Span(0, 3)),
    ]
    assert fit_slowdown(steps, costs, gpus=1) == Slowdown(trainer=1.5)


def test_requests_that_a_simulation_has_at_once_are_not_those_that_a_run_had(tmp_path, monkeypatch):
    """A run of 6 at once says what its steps cost; simulated with 48 they cost the same."""
    drawn, steps = random.Random(0), []
    costs = EngineCosts(step_s=0.01, request_s=2e-4, kv_token_s=3e-7, prefill_token_s=1e-5, slots=6)
    times = {"train_time": 1.0, "rollout_time": 1.0, "step_time": 2.0}
    for _ in range(4):
        prompts = [drawn.randint(50, 300) for _ in range(20)]
        responses = [drawn.randint(1, 400) for _ in range(20)]
        steps.append(step(prompts, responses, generate_s(costs, prompts, responses), **times))
    own = {"rollout": {"rollout_engine": "torch"}, "torch": {"max_running_requests": 6}}
    run = RecordedRun(folder=tmp_path, config=own, steps=steps, lengths={0: (1, 1)})
    monkeypatch.setattr(
        options, "read_run", lambda folder: replace(run, replicas=1 + (folder.name == "fleet"))
    )
    given = [
        "--from-run",
        "one",
        "--hf-checkpoint",
        "x",
        "--rollout-batch-size",
        "8",
        "--rollout-max-response-len",
        "9",
    ]
    for slots in (6, 48):
        words = [*given, "--slots", str(slots)] if slots == 48 else given
        asked = options.read(options.parser("slime simulate", ""), words)
        assert vars(asked.scenario.costs.engine) == pytest.approx(vars(costs) | {"slots": slots}, rel=1e-6)
    with pytest.raises(ConfigError, match="of 2 engines; wanted a run of one"):
        options.read(options.parser("slime simulate", ""), [given[0], "fleet", *given[2:]])


@pytest.mark.parametrize(
    ("engine", "sections", "slots"),
    [
        ("torch", {"torch": {"max_running_requests": 64}}, 64),
        ("slime-torch/torch", {"torch": {"max_running_requests": 64}}, 64),
        ("sglang", {"torch": {"max_running_requests": 64}, "sglang": {"server_args": {"max_running_requests": 512}}}, 512),
        ("sglang", {"torch": {"max_running_requests": 64}, "sglang": {"server_args": {}}}, None),
        ("tabular", {"torch": {"max_running_requests": 64}}, None),
    ],
)  # fmt: skip
def test_the_limit_of_a_run_is_that_of_its_engine(tmp_path, engine, sections, slots):
    config = {"rollout": {"rollout_engine": engine}} | sections
    assert RecordedRun(folder=tmp_path, config=config, steps=[], lengths={}).slots == slots


def recorded(folder, loop, **config):
    rollout = {"partial_rollout": config.pop("partial_rollout", False)}
    step = Step(metrics={}, prompts=[1], responses=[1], generate_s=[], reward_s=[])
    return RecordedRun(
        folder=folder, config={"run": {"loop": loop}, "rollout": rollout}, steps=[step], lengths={0: (1, 1)}
    )


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([("fully-async", {})], "a run of the loop fully-async"),
        ([("sync", {}), ("sync", {"partial_rollout": True})], "sync, with partial rollouts"),
        ([("one-step-off", {})], "one of the loop sync among them"),
    ],
)
def test_runs_that_do_not_say_what_the_parts_cost_are_refused(tmp_path, runs, why):
    with pytest.raises(ConfigError, match=why):
        fit([recorded(tmp_path, loop, **config) for loop, config in runs], slots=1)


def test_a_trace_fills_gaps_with_the_lengths_of_others(tmp_path):
    run = replace(recorded(tmp_path, "sync"), lengths={0: (5, 6), 2: (7, 8)})
    assert [run.trace.response_tokens(index) for index in range(4)] == [6, 8, 8, 6]


def test_no_coefficient_is_below_zero():
    """The best fit of 1, 0 at 1, 2 falls; the best one that does not is the constant 1/2."""
    found = least_squares(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 0.0]))
    assert found == pytest.approx([0.5, 0.0])


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without a step that is recorded"):
        read_run(tmp_path)
