"""Fitting: coefficients that are known come back, from schedules worked by hand and from what a replica really takes."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from slime_core.errors import ConfigError
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_simulator.costs import EngineCosts
from slime_simulator.fit import Step, fit_engine, fit_trainer, least_squares, read_run, schedule
from slime_simulator.replica import SimulatedReplica, SimulatedRequest


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


def test_no_coefficient_is_below_zero():
    """The best fit of 1, 0 at 1, 2 falls; the best one that does not is the constant 1/2."""
    found = least_squares(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 0.0]))
    assert found == pytest.approx([0.5, 0.0])


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without a step that is recorded"):
        read_run(tmp_path)
