"""Whole simulated runs: times worked by hand, what holds of every loop, and the decisions of a run on the real clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.run.tracking import attach
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_simulator.costs.costs import Costs, EngineCosts, Slowdown, TrainerCosts, UpdateCosts
from slime_simulator.costs.traces import Lognormal, Recorded
from slime_simulator.scenario import Scenario
from slime_simulator.simulation import Cluster, simulate, simulated_run

#: The longest of each step's two responses: 5, 4 and 6 tokens.
BY_HAND = Recorded(prompts=[0], responses=[3, 5, 4, 1, 6, 6])
SECOND = Costs(
    engine=EngineCosts(step_s=1.0),
    trainer=TrainerCosts(token_gpu_s=0.0, fixed_s=2.0),
    update=UpdateCosts(send_s=1.0, pause_s=1.0),
)
LOOPS = {
    "sync": ["--loop", "sync"],
    "partial": ["--loop", "sync", "--partial-rollout", "--over-sampling-batch-size", "8", "--rollout-in-completion-order"],
    "one-step-off": ["--loop", "one-step-off"],
    "async": ["--loop", "fully-async", "--max-staleness", "2"],
    "async, as completed": ["--loop", "fully-async", "--max-staleness", "2", "--rollout-in-completion-order"],
    "async, continued": ["--loop", "fully-async", "--max-staleness", "3", "--update-weights-in-flight", "continue"],
}  # fmt: skip


@pytest.fixture
def registry():
    return Registry.from_environment()


def settings(registry, *flags, prompts=2, samples=1, steps=3):
    words = [
        "--hf-checkpoint", "none", "--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(samples),
        "--num-rollout", str(steps), "--rollout-max-response-len", "100000", "--no-save-last", *flags,
    ]  # fmt: skip
    return load_settings([], words, registry=registry)


class Batches:
    """Keeps (group, first weights) of each step."""

    def __init__(self):
        self.steps = []

    @hookimpl
    def slime_rollout_end(self, run, step, groups):
        self.steps.append([(group[0].group_index, int(group[0].weight_versions[0])) for group in groups])


def drive(registry, given, costs, cluster, trace, *, in_real_time=False):
    """Drive a run by its loop; returns its batches, and the groups that its dispatcher and buffer still have."""

    async def work():
        run, _, _ = simulated_run(given, registry, costs, cluster, trace)
        batches = Batches()
        run.trackers = [batches]
        attach(registry, run.trackers)
        try:
            await registry.resolve("slime.loops", given.run.loop)(run)
        finally:
            await run.close()
        held = [job.group for job in [*run.dispatcher.jobs.kept, *run.dispatcher.jobs.undecided]]
        held += run.buffer.take(len(run.buffer))
        return batches.steps, held, run.source

    return asyncio.run(work()) if in_real_time else run_in_virtual_time(work())[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--loop", "sync"], [5 + 2 + 1, 4 + 2 + 1, 6 + 2 + 1]),
        # The first generates beside nothing; each generates the next step's beside its training; the last trains alone.
        (["--loop", "one-step-off"], [5 + 4 + 1, 6 + 1, 2 + 1]),
        # Four prompts begin at 0, the last two at 8, when the first weights have arrived: 2 of their 6 tokens come by 10, where
        # the second update pauses them for 1 s, and the others by 15.
        (["--loop", "fully-async", "--max-staleness", "1"], [5 + 2 + 1, 2 + 1, 4 + 2 + 1]),
    ],
)  # fmt: skip
def test_steps_take_the_time_worked_by_hand(registry, flags, expected):
    cluster = Cluster(replicas=1, trainer_gpus=1)
    found = simulate(settings(registry, *flags), registry, SECOND, cluster, BY_HAND)
    assert found.step_times == pytest.approx(expected)
    assert (found.steps, found.samples, found.tokens) == (3, 6, 25)
    assert found.trainer_idle == pytest.approx(1 - 6 / sum(expected))
    assert found.update_share == pytest.approx(3 / sum(expected))


def test_the_engine_is_idle_while_the_synchronous_loop_trains(registry):
    cluster = Cluster(replicas=1, trainer_gpus=1)
    found = simulate(settings(registry), registry, SECOND, cluster, BY_HAND)
    assert found.engine_idle == pytest.approx(1 - (5 + 4 + 6) / 24)


def test_devices_that_are_shared_change_hands_twice_a_step(registry):
    """Of the first step 5 s of generation, the trainer's 0.25 s onto the devices, 2 s, 1 s; 0.25 s each off and on."""
    costs = Costs(
        engine=SECOND.engine, trainer=SECOND.trainer, update=UpdateCosts(send_s=1.0, pause_s=1.0, switch_s=0.25)
    )  # fmt: skip
    given = settings(registry, "--colocate")
    found = simulate(given, registry, costs, Cluster(replicas=1, trainer_gpus=1), BY_HAND)
    assert found.step_times == pytest.approx([8 + 4 * 0.25, 7 + 4 * 0.25, 9 + 4 * 0.25])


def test_parts_on_the_same_cores_slow_each_other_down(registry):
    """By half: training takes 3 s, in which the engine does 2 s of work. Of the second step's 4 tokens 2 are left then, of the
    third's 6 four; the first step generates alone before, and the last trains alone.
    """
    costs = replace(SECOND, slowdown=Slowdown(step=1.5, request=1.5, trainer=1.5))
    cluster = Cluster(replicas=1, trainer_gpus=1)
    found = simulate(settings(registry, "--loop", "one-step-off"), registry, costs, cluster, BY_HAND)
    assert found.step_times == pytest.approx([5 + 3 + 2 + 1, 3 + 4 + 1, 2 + 1])


def test_training_that_outlasts_generation_goes_on_at_full_speed(registry):
    """Generating 4 tokens beside training takes 6 s, in which 4 of the trainer's 8 s are done; 6 tokens 9 s, and 6 s of them."""
    costs = replace(
        SECOND,
        trainer=TrainerCosts(token_gpu_s=0.0, fixed_s=8.0),
        slowdown=Slowdown(step=1.5, request=1.5, trainer=1.5),
    )
    cluster = Cluster(replicas=1, trainer_gpus=1)
    found = simulate(settings(registry, "--loop", "one-step-off"), registry, costs, cluster, BY_HAND)
    assert found.step_times == pytest.approx([5 + 6 + 4 + 1, 9 + 2 + 1, 8 + 1])


@pytest.mark.parametrize(("shared", "expected"), [(False, 2 * 1.0 + 3 + 2.6 + 1), (True, 1.0 + 3 + 1.6 + 1)])
def test_a_prompt_that_is_shared_is_prefilled_and_trained_once(registry, shared, expected):
    """Two samples of 3 tokens on a prompt of 10: 0.1 s for each token of prefill and of training."""
    costs = replace(
        SECOND,
        engine=EngineCosts(step_s=1.0, prefill_token_s=0.1, shares_prompts=shared),
        trainer=TrainerCosts(token_gpu_s=0.1, shares_prompts=shared),
    )
    given = settings(registry, prompts=1, samples=2, steps=1)
    found = simulate(given, registry, costs, Cluster(replicas=1, trainer_gpus=1), Recorded([10], [3]))
    assert found.step_times == pytest.approx([expected])
    assert found.tokens == 2 * (10 + 3)


def test_evaluations_and_checkpoints_take_time_between_the_steps(registry):
    """Both after each step; those before the first step and after the last are no part of the time of the steps."""
    costs = replace(SECOND, eval_s=0.5, save_s=0.25)
    given = settings(registry, "--save-interval", "1").having("eval", "eval_interval", 1, origin="test")
    found = simulate(given, registry, costs, Cluster(replicas=1, trainer_gpus=1), BY_HAND)
    assert found.step_times == pytest.approx([8, 7, 9])
    assert found.wall_s == pytest.approx(24 + 2 * 0.75)


def test_what_the_engine_did_during_an_evaluation_is_no_work_of_the_next_step(registry):
    """Step 2's groups, and those of step 3 that the bound admits, are generated in the evaluation of 100 s after step 1. Step 2 takes 2 s of
    training and 2 s of an update, and nothing is admitted before that."""
    shares = []

    class Shares:
        @hookimpl
        def slime_step_end(self, run, step, metrics):
            shares.append(metrics.get("perf/engine_idle_share"))

    given = settings(registry, "--loop", "fully-async", "--max-staleness", "1")
    given = given.having("eval", "eval_interval", 1, origin="test").having(
        "eval", "skip_eval_before_train", True, origin="test"
    )
    costs = replace(SECOND, eval_s=100.0)

    async def work():
        run, _, _ = simulated_run(given, registry, costs, Cluster(replicas=1, trainer_gpus=1), BY_HAND)
        run.trackers = [Shares()]
        attach(registry, run.trackers)
        try:
            await registry.resolve("slime.loops", given.run.loop)(run)
        finally:
            await run.close()

    run_in_virtual_time(work())
    assert shares[1] == pytest.approx(1.0)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_prompt_is_used_once_and_none_is_too_old(registry, loop):
    given = settings(registry, *LOOPS[loop], prompts=4, samples=2, steps=30)
    trace = Lognormal(median=20, p99=400, longest=3000, prompt=5)
    costs = Costs(
        engine=EngineCosts(step_s=1.0, request_s=0.1, kv_token_s=0.001, prefill_token_s=0.01, slots=3),
        trainer=TrainerCosts(token_gpu_s=0.1, fixed_s=1.0),
        update=UpdateCosts(send_s=2.0, pause_s=1.0),
    )
    batches, held, source = drive(registry, given, costs, Cluster(replicas=2, trainer_gpus=2), trace)
    assert [len(batch) for batch in batches] == [4] * 30
    seen = Counter(group for batch in batches for group, _ in batch)
    seen += Counter(group[0].group_index for group in held)
    assert seen == Counter(range(source.state()["taken"]))
    bound = {"sync": 0, "one-step-off": 1, "partial": 30}.get(loop, given.rollout.max_staleness)
    assert max(step - version for step, batch in enumerate(batches) for _, version in batch) <= bound


def largest_gap(ones, others):
    """Kolmogorov-Smirnov: the largest difference of two distributions, over what one in twenty draws of the same exceeds."""
    ones, others = np.sort(ones), np.sort(others)
    at = np.concatenate([ones, others])
    shares = [np.searchsorted(each, at, side="right") / len(each) for each in (ones, others)]
    return np.abs(shares[0] - shares[1]).max() / (1.358 * (1 / len(ones) + 1 / len(others)) ** 0.5)


#: What takes longer than a step or two is dropped.
DROPPING = [
    "--loop",
    "fully-async",
    "--max-staleness",
    "1",
    "--max-staleness-policy",
    "drop",
    "--rollout-in-completion-order",
]


@pytest.mark.parametrize("loop", [*LOOPS, "dropping"])
def test_what_is_trained_is_as_long_as_what_was_submitted(registry, loop):
    """By step 200 of 300; but where old groups are dropped, which the test is to notice."""
    flags = LOOPS.get(loop, DROPPING)
    trace = Lognormal(median=20, p99=400, longest=3000, prompt=5)
    costs = Costs(
        engine=EngineCosts(step_s=1.0, kv_token_s=0.001, slots=6),
        trainer=TrainerCosts(token_gpu_s=0.1, fixed_s=1.0),
        update=UpdateCosts(send_s=2.0, pause_s=1.0),
    )
    given = settings(registry, *flags, prompts=4, steps=300)
    batches, _, source = drive(registry, given, costs, Cluster(replicas=1, trainer_gpus=2), trace)
    trained = [trace.response_tokens(group) for batch in batches[:200] for group, _ in batch]
    submitted = [trace.response_tokens(group) for group in range(source.state()["taken"])]
    assert len(trained) == 200 * 4 < len(submitted)
    assert (largest_gap(trained, submitted) < 1) == (loop != "dropping")


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_simulation_gives_the_same_numbers(registry, loop):
    given = settings(registry, *LOOPS[loop], prompts=4, steps=10)
    trace = Lognormal(median=20, p99=400, longest=3000, prompt=5)
    once, again = (
        simulate(given, Registry.from_environment(), SECOND, Cluster(replicas=3, trainer_gpus=1), trace)
        for _ in range(2)
    )
    assert once == again


@pytest.mark.parametrize("loop", ["sync", "one-step-off", "async"])
def test_the_decisions_are_those_of_a_run_on_the_real_clock(registry, loop):
    """In the order of submission a decision depends on weights and order, and not on how long anything takes."""
    given = settings(registry, *LOOPS[loop], prompts=4, samples=2, steps=12)
    trace = Lognormal(median=10, p99=200, longest=300)
    costs = Costs(
        engine=EngineCosts(step_s=2e-4),
        trainer=TrainerCosts(token_gpu_s=0.0, fixed_s=0.01),
        update=UpdateCosts(send_s=0.002, pause_s=0.002),
    )
    cluster = Cluster(replicas=2, trainer_gpus=1)
    live, _, _ = drive(Registry.from_environment(), given, costs, cluster, trace, in_real_time=True)
    virtual, _, _ = drive(registry, given, costs, cluster, trace)
    assert live == virtual


def test_a_lognormal_trace_has_its_percentiles():
    trace = Lognormal(median=1000, p99=20000, longest=60000)
    drawn = sorted(trace.response_tokens(index) for index in range(50000))
    assert drawn[25000] == pytest.approx(1000, rel=0.03)
    assert drawn[49500] == pytest.approx(20000, rel=0.08)
    assert drawn[-1] == 60000


@pytest.mark.parametrize(("limit", "seconds"), [(None, 10), (12, 10), (6, 20), (1, 120), (5, 30)])
def test_a_limit_counts_responses_and_lets_them_through_in_order(registry, limit, seconds):
    """A step of 4 prompts with 3 responses of 10 tokens, a token a second: 12 in flight, or so many after so many."""
    given = settings(registry, prompts=4, samples=3, steps=2)
    given = given.having("rollout", "rollout_concurrency", limit, origin="the test")
    trace = Lognormal(median=10, p99=10, longest=10)
    costs = Costs(engine=EngineCosts(step_s=1.0), trainer=TrainerCosts(token_gpu_s=0.0))
    found = simulate(given, registry, costs, Cluster(replicas=1, trainer_gpus=1), trace)
    assert found.step_times == pytest.approx([seconds, seconds])


def test_a_limit_that_follows_the_kv_cache_is_refused(registry):
    given = settings(registry).having("rollout", "rollout_concurrency", "auto", origin="the test")
    trace = Lognormal(median=10, p99=10, longest=10)
    costs = Costs(engine=EngineCosts(step_s=1.0), trainer=TrainerCosts(token_gpu_s=0.0))
    work = Scenario(settings=given, costs=costs, cluster=Cluster(replicas=1, trainer_gpus=1), trace=trace)
    with pytest.raises(ConfigError, match="the KV cache, which auto follows, is not modelled"):
        work.simulate(registry)
