"""Evaluation on held-out prompts: accuracy, pass@k, lengths."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.errors import RewardError
from slime_core.protocols import DataSource, Metrics, SamplingParams
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.group import run_group
from slime_core.run.metrics import evaluation_metrics
from slime_core.samples import Group, Sample


async def evaluate_groups(
    run: RolloutRun,
    source: DataSource,
    *,
    step: int,
    start: Mapping[str, Any],
    write: Callable[[Sequence[Group]], None],
) -> tuple[Metrics, float]:
    """Generate and score all held-out prompts, from the first on.

    Args:
        run: whose engine generates.
        source: of the held-out prompts.
        step: after which it is evaluated, 0 before the first.
        start: position of the first of them.
        write: given the scored groups, before anything is asked of them.

    Returns:
        `eval/*` metrics by evaluation set, and the share of samples of all sets that reach
        `eval_pass_threshold`, between 0 and 1.
    """
    section = run.settings.eval
    source.restore(start)
    n = len(source)
    groups = source.take(n)
    done = 0

    async def one(group: Group) -> Group:
        nonlocal done
        result = await run_group(
            run, group, params_of=lambda sample: eval_params(run, sample), evaluation=True
        )
        done += 1
        run.report("eval", done, n)
        return result

    finished = list(await asyncio.gather(*(one(group) for group in groups)))
    write(finished)
    key = run.settings.reward.eval_reward_key or run.settings.reward.reward_key
    by_name: dict[str, list[Group]] = defaultdict(list)
    for group in finished:
        for sample in group:
            if sample.failure is not None:
                raise RewardError(f"{sample.name} (evaluation): {sample.failure}")
        by_name[str(group[0].metadata.get("source_name", "eval"))].append(group)
    metrics: Metrics = {}
    for name, members in by_name.items():
        metrics |= evaluation_metrics(name, members, reward_key=key, threshold=section.eval_pass_threshold)
    samples = [sample for group in finished for sample in group]
    if run.user_hooks.logs_evaluation(step, by_name, dict(metrics), reward_key=key):
        metrics = {}
    solved = sum(sample.reward_value(key) >= section.eval_pass_threshold for sample in samples)
    return metrics, solved / len(samples)


def eval_params(run: RolloutRun, sample: Sample) -> SamplingParams:
    """Return how an evaluation sample is drawn."""
    section, rollout = run.settings.eval, run.settings.rollout
    return SamplingParams(
        max_new_tokens=section.eval_max_response_len or rollout.rollout_max_response_len,
        temperature=section.eval_temperature,
        top_p=section.eval_top_p,
        top_k=section.eval_top_k,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        seed=(rollout.rollout_seed << 40) + (1 << 39) + (sample.index or 0),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )
