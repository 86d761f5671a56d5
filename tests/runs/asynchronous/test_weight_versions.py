"""Weights and KV caches of requests in flight, in runs of the real engine `torch` and the real trainer on a tiny model.

The learning rate is so high that a step changes log-probs by a nat: whatever takes the wrong weights is far off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from slime_core.config.factories import EngineFactory
from slime_core.config.load import load_settings
from slime_core.errors import TrainerError
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.run.assemble import assemble
from slime_torch.factory import create_engine

#: Groups of a step; what is submitted beyond the first step is in flight while that is trained.
BATCH = 2
N_SAMPLES = 4
STEP = BATCH * N_SAMPLES
LENGTH = 60


def keep_stale_cache(engine) -> None:
    """Make updates leave the KV cache of running requests, and the prefixes that others copy, as the old weights made them."""

    def end_update(update, *, complete, before):
        engine._scheduler.version = update.version
        engine._worker.release("update")

    engine._end_update = end_update


def create_stale_engine(build):
    """Build the engine `torch` with the fault."""
    engine = create_engine(build)
    keep_stale_cache(engine)
    return engine


stale_engine = EngineFactory(create_stale_engine, create_engine.capabilities, create_engine.context_limit)


async def longer_later(ctx, sample, params):
    """The second step's groups have three times the tokens of the first one's."""
    n = params.max_new_tokens // (1 if sample.group_index >= BATCH else 3)
    return await single_turn(ctx, sample, dataclasses.replace(params, max_new_tokens=n, min_new_tokens=n))


def hold_after(engine, n_requests: int) -> None:
    """Have the engine's thread stand still whenever so many requests are over, until `go_on`: at the same token on any machine."""
    worker, finish = engine._worker, engine._worker.finish
    n_over = 0

    def counted(requests, error=None):
        nonlocal n_over
        n_over += len(requests)
        if n_over >= n_requests:
            worker.hold("step")
            n_over = 0
        finish(requests, error)

    worker.finish = counted


async def go_on(engine) -> None:
    await engine._worker.call(lambda: engine._worker.release("step"))


async def paused_while_training(run):
    """The loop fully-async; the engine stands still from the end of a step's requests until the weights have come."""
    hold_after(run.engine, STEP)
    await run.begin()
    async with run.generating_always():
        for step in run.steps:
            groups = await run.rollout(step)
            await run.train(run.batch(step, groups))
            await run.sync_weights(step)
            await go_on(run.engine)
            await run.end_step(step)


async def beside_a_twin(run):
    """The loop sync beside a request for the data's only prompt, which is in flight all the time; see `paused_while_training`."""
    prompt, worker = run.tokenizer.encode("abcdefgh"), run.engine._worker
    params = SamplingParams(max_new_tokens=200, min_new_tokens=200, temperature=0)
    hold_after(run.engine, STEP)
    await run.begin()
    await worker.call(lambda: worker.hold("step"))
    twin = asyncio.create_task(run.engine.generate(prompt, params))
    for step in run.steps:
        rollout = asyncio.create_task(run.rollout(step))
        while len(worker._inbox) < (STEP if step > 1 else STEP + 1):
            await asyncio.sleep(0)
        await go_on(run.engine)
        await run.train(run.batch(step, await rollout))
        await run.sync_weights(step)
        await run.end_step(step)
    assert not twin.done()
    twin.cancel()


@pytest.fixture
def recipe(letters, qwen3) -> Path:
    """A recipe of three steps, in float32, whose only prompt is `abcdefgh`."""
    text = "\n".join(line for line in letters.read_text().splitlines() if not line.startswith("eval_"))
    letters.write_text(text)
    (letters.parent / "letters.jsonl").write_text('{"input": "abcdefgh", "label": "x"}\n' * 10)
    return letters


@pytest.fixture
def train(recipe, qwen3):
    """Train two steps by a loop; returns the rows of metrics, and the samples of step 2."""

    def run(*flags: str, loop: str, name: str = "plain") -> list[dict[str, float]]:
        options = {
            "hf-checkpoint": qwen3, "rollout-engine": "torch", "train-backend": "megatron",
            "advantage-estimator": "grpo", "loss-type": "policy_loss", "loss-reducer": "sample-mean",
            "rm-type": "slime_bench.step.work:parity", "lr": "1e-2", "num-rollout": 2, "rollout-batch-size": BATCH,
            "n-samples-per-prompt": N_SAMPLES, "rollout-max-response-len": LENGTH, "save-interval": 100, "loop": loop,
            "run-name": name,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        registry = Registry()
        settings = load_settings([str(recipe)], [*words, "--no-bf16", *flags], registry=registry)

        async def main() -> None:
            await drive(await assemble(settings, registry))

        asyncio.run(main())
        lines = (recipe.parent / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


STALE = ("--rollout-engine", f"{__name__}:stale_engine")
LONGER = ("--custom-generate-function-path", f"{__name__}:longer_later")
DIFF = "train/train_rollout_logprob_abs_diff"


def test_tokens_that_follow_an_update_are_those_of_the_new_weights(train):
    rows = train(*LONGER, "--max-staleness", "1", loop=f"{__name__}:paused_while_training")
    assert rows[1]["rollout/mixed_version_share"] == 1.0  # step 2: all were in flight at the update
    assert rows[1][DIFF] > 0.5  # the policy has moved: stale tokens differ, which is no fault
    assert rows[1][f"{DIFF}/on_policy"] < 1e-4
    assert rows[1][f"{DIFF}/worst_sample"] < 1e-4


def test_a_kv_cache_that_is_kept_and_said_to_be_new_stops_the_run_in_its_step(train):
    with pytest.raises(TrainerError, match=r"step 2: rollout and trainer log-probs .*sample \d+"):
        train(*LONGER, *STALE, "--max-staleness", "1", loop=f"{__name__}:paused_while_training")


def test_a_prefix_that_was_computed_before_an_update_stops_the_run_in_its_step(train):
    rows = train(loop=f"{__name__}:beside_a_twin")
    assert max(row[f"{DIFF}/worst_sample"] for row in rows) < 1e-4
    assert "rollout/off_policy_token_share" not in rows[1]
    with pytest.raises(TrainerError, match=r"step 2: rollout and trainer log-probs .*sample \d+"):
        train(*STALE, loop=f"{__name__}:beside_a_twin", name="stale")


def test_old_log_probs_one_step_off_are_those_of_the_weights_that_generated(train):
    """The engine's own log-probs are of these weights: with --keep-old-actor the old ones equal them, else they are a step off."""
    plain = train("--logprob-diff-limit", "100", "--num-rollout", "3", loop="one-step-off")
    assert [row["rollout/off_policy_token_share"] for row in plain[1:]] == [1.0, 1.0]
    assert min(row[DIFF] for row in plain[1:]) > 0.1
    kept = train("--keep-old-actor", "--num-rollout", "3", loop="one-step-off", name="kept")
    assert max(row[DIFF] for row in kept) < 1e-4
