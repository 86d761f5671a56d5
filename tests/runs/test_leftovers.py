"""What a rollout leaves over: groups that were surplus or aborted come back as what they were taken for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import reset
from slime_core.run.assemble import assemble
from slime_core.samples import Sample, Status
from slime_core.testing.tabular import TabularEngine


def train(recipe: Path, *flags: str) -> list[list[dict]]:
    """Train, and return the samples of each step."""
    registry = Registry()
    settings = load_settings([str(recipe)], flags, registry=registry)

    async def main() -> None:
        await drive(await assemble(settings, registry))

    asyncio.run(main())
    files = sorted((recipe.parent / "runs/letters/rollouts").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


class HoldingEngine(TabularEngine):
    """Until it is aborted for the first time, it holds responses after their first token; not short ones, and not evaluations."""

    def __init__(self):
        super().__init__()
        self.aborted = asyncio.Event()

    async def generate(self, tokens, params, *, session_id=None):
        if params.max_new_tokens == 1 or params.temperature == 0 or self.aborted.is_set():
            return await super().generate(tokens, params, session_id=session_id)
        first = await super().generate(tokens, dataclasses.replace(params, max_new_tokens=1))
        await self.aborted.wait()
        return dataclasses.replace(first, finish_reason="abort")

    async def abort(self):
        await super().abort()
        self.aborted.set()


#: Engines of the runs, the newest last.
ENGINES = []


def create_engine(build):
    ENGINES.append(HoldingEngine())
    return ENGINES[-1]


async def two_responses(ctx, sample, params):
    """One execution of two samples, also when it is resumed. Those of two prompts of three are long."""
    if ctx.evaluation:
        return await single_turn(ctx, sample, params)
    n = min(params.max_new_tokens, 6 if sample.group_index % 12 >= 4 else 1)
    params = dataclasses.replace(params, max_new_tokens=n, min_new_tokens=n)
    other = reset(sample)
    sample.rollout_id = other.rollout_id = sample.index
    return list(await asyncio.gather(single_turn(ctx, sample, params), single_turn(ctx, other, params)))


@pytest.mark.parametrize("flags", [[], ["--partial-rollout"]])
@pytest.mark.parametrize("length", ["1", "6"])
def test_groups_that_fan_out_and_come_back_have_two_samples_for_each_execution(letters, flags, length):
    """The surplus of over-sampling is finished where no response has more than 1 token, and aborted in the middle with 6."""
    steps = train(
        letters,
        *("--custom-generate-function-path", f"{__name__}:two_responses", "--num-rollout", "4"),
        *("--rollout-engine", f"{__name__}:create_engine"),
        *("--over-sampling-batch-size", "12", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", length, *flags),
    )
    executions = Counter(sample["rollout_id"] for step in steps for sample in step)
    assert len(executions) == 4 * 4 * 2
    assert set(executions.values()) == {2}


def test_a_surplus_group_whose_reward_failed_is_generated_again_and_dropped_in_its_turn(letters, monkeypatch):
    (letters.parent / "fails_on_e.py").write_text(
        "def score(sample):\n    return 1 / (sample.prompt != 'e')\n"
    )
    monkeypatch.syspath_prepend(str(letters.parent))  # workers are given the path
    recipe = letters.read_text()
    letters.write_text(
        "\n".join(line for line in recipe.splitlines() if not line.startswith(("rm_type", "eval_")))
    )
    steps = train(
        letters,
        *("--custom-rm-path", "fails_on_e:score", "--on-reward-error", "drop", "--partial-rollout"),
        *("--over-sampling-batch-size", "8", "--num-rollout", "6"),
    )
    seen = Counter(sample["prompt"] for step in steps for sample in step)
    rows = [
        json.loads(line) for line in (letters.parent / "runs/letters/metrics.jsonl").read_text().splitlines()
    ]
    n_dropped = sum(row.get("rollout/reward_errors", 0.0) for row in rows)
    assert sum(seen.values()) == 6 * 4 * 16
    assert n_dropped >= 2  # each epoch of ten prompts has one, and six steps take 24 that are kept
    assert "e" not in seen


async def two_turns(ctx, sample, params):
    """A turn, a tool call, a turn; the tools of surplus groups return only when the rollout was aborted."""
    sample = await single_turn(ctx, sample, dataclasses.replace(params, max_new_tokens=1))
    if ctx.evaluation or sample.group_index < 4 or sample.status is Status.ABORTED:
        return sample
    await ENGINES[-1].aborted.wait()
    completion = await ctx.engine.generate(sample.tokens, params)
    sample.metadata["second_turn"] = (completion.tokens, completion.finish_reason, completion.weight_version)
    sample.append_response(
        completion.tokens, log_probs=completion.log_probs, finish_reason=completion.finish_reason
    )
    return sample


def test_a_turn_that_begins_after_the_abort_is_aborted_without_tokens(letters):
    registry = Registry()
    flags = [
        *("--custom-generate-function-path", f"{__name__}:two_turns", "--num-rollout", "1"),
        *("--rollout-engine", f"{__name__}:create_engine", "--over-sampling-batch-size", "12"),
        *("--rollout-max-response-len", "6", "--partial-rollout"),
    ]
    settings = load_settings([str(letters)], flags, registry=registry)

    async def main() -> list[Sample]:
        run = await assemble(settings, registry)
        await drive(run)
        return [sample for group in run.take(8) for sample in group]

    left = asyncio.run(main())
    assert {sample.group_index for sample in left} == set(range(4, 12))
    assert {sample.status for sample in left} == {Status.ABORTED}
    assert all(sample.metadata["second_turn"] == ([], "abort", "0") for sample in left)
    assert {sample.response_length for sample in left} == {1}
    assert {sample.metadata["start_rollout_id"] for sample in left} == {0}  # that of step 1
