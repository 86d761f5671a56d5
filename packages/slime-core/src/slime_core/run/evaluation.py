"""Evaluation on held-out prompts: accuracy, pass@k, lengths."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.config.eval_sets import EvalSet, eval_sets, longest_context, longest_response, set_of
from slime_core.errors import DataError, RewardError, SampleError
from slime_core.protocols import DataSource, EvalFn, Metrics, SamplingParams
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.given_metrics import given_metrics
from slime_core.rollout.group import failure_of, run_group
from slime_core.run.metrics import evaluation_metrics, outcomes
from slime_core.samples import Group, Sample, Status

logger = logging.getLogger(__name__)


async def evaluate_groups(
    run: RolloutRun,
    source: DataSource | None,
    *,
    step: int,
    start: Mapping[str, Any],
    write: Callable[[Sequence[Group]], None],
    function: EvalFn | None = None,
) -> tuple[Metrics, float]:
    """Have all held-out prompts generated and scored, from the first on.

    Args:
        run: whose engine generates.
        source: of the held-out prompts; None where the function has its own.
        step: after which it is evaluated, 0 before the first.
        start: position of the first of them.
        write: given the scored groups, before anything is asked of them.
        function: that has them generated, a user's; `evaluate` when not given.

    Returns:
        `eval/*` metrics by evaluation set, and the share of all sets' executions that reach `eval_pass_threshold`,
        between 0 and 1.

    Raises:
        SampleError: the function returned something else than groups of samples by the name of their set.
        PluginError: one of its metrics, or of those of the function that logs, is no number.
        RewardError: a reward failed and `on_reward_error` is `stop`, or no group of a set is without a failed sample.
    """
    threshold = run.settings.eval.eval_pass_threshold
    if source is not None:
        source.restore(start)
    answer = await (function or evaluate)(run, step, source)
    by_name, more = answer if isinstance(answer, tuple) else (answer, {})
    _check(by_name, more, step)
    more = given_metrics(more, who="the function of --eval-function-path")
    finished = [group for groups in by_name.values() for group in groups]
    write(finished)
    key = run.settings.reward.eval_reward_key or run.settings.reward.reward_key
    by_name, metrics = _without_failed(by_name)
    for name, members in by_name.items():
        metrics |= evaluation_metrics(name, members, reward_key=key, threshold=threshold)
    metrics |= more
    takes_over, added = run.user_hooks.logs_evaluation(step, by_name, metrics, reward_key=key)
    metrics = added if takes_over else metrics | added
    return metrics, _accuracy(run, by_name, key)


def _without_failed(by_name: Mapping[str, Sequence[Group]]) -> tuple[dict[str, list[Group]], Metrics]:
    """Return the groups without a failed sample, and how many others there are, if any; raises if none is left.

    A reward that failed where such stop the run has raised already; what is left are executions that failed by themselves.
    """
    kept: dict[str, list[Group]] = {}
    metrics: Metrics = {}
    for name, groups in by_name.items():
        kept[name] = [group for group in groups if failure_of(group) is None]
        if n := len(groups) - len(kept[name]):
            failed = next(one for group in groups for one in group if one.status is Status.FAILED)
            if not kept[name]:
                raise RewardError(f"{failed.name} (evaluation): {failed.failure}")
            logger.warning(
                "evaluation %s: %d of %d prompts failed, the first: %s", name, n, len(groups), failed.failure
            )
            metrics[f"eval/{name}/reward_errors"] = float(n)
    return kept, metrics


def _accuracy(run: RolloutRun, by_name: Mapping[str, Sequence[Group]], key: str | None) -> float:
    """Return the share of executions that are solved: of all, or where sets have weights the weighted mean of the sets'."""
    threshold = run.settings.eval.eval_pass_threshold
    rates, sizes = {}, {}
    for name, groups in by_name.items():
        solved = [one.reward_value(key) >= threshold for group in groups for one in outcomes(group)]
        rates[name], sizes[name] = sum(solved) / len(solved), len(solved)
    sets = {} if run.settings.eval.eval_config is None else eval_sets(run.settings, run.registry)
    given = {name: sets[name].weight if name in sets else None for name in rates}
    weighs = any(weight is not None for weight in given.values())
    weights = {name: given[name] or 1.0 if weighs else sizes[name] for name in rates}
    return sum(weights[name] * rate for name, rate in rates.items()) / sum(weights.values())


async def evaluate(run: RolloutRun, step: int, source: DataSource | None) -> dict[str, list[Group]]:
    """Generate and score all prompts of a source, each as the settings of its evaluation set say.

    Args:
        run: whose engine generates.
        step: after which it is evaluated, 0 before the first.
        source: of the held-out prompts.

    Returns:
        Evaluation set -> its groups.

    Raises:
        DataError: there are no held-out prompts.
    """
    if source is None:
        raise DataError("eval.eval_prompt_data: found nothing; wanted held-out prompts (--eval-prompt-data)")
    n = len(source)
    groups = source.take(n)
    sets = {} if run.settings.eval.eval_config is None else eval_sets(run.settings, run.registry)
    done = 0

    async def one(group: Group) -> Group:
        nonlocal done
        result, is_ended = group, True
        while is_ended:  # by weights for an engine that came back; those of training go on, too
            engine = AbortableEngine(run.engine, run.concurrency)
            result = await run_group(
                run,
                result,
                params_of=lambda sample: eval_params(run, sample, sets),
                engine=engine,
                evaluation=True,
                max_context_len=longest_context(set_of(group[0].metadata, sets), run.settings),
            )
            is_ended = engine.has_ended_requests and any(one.status is Status.ABORTED for one in result)
        done += 1
        run.report("eval", done, n)
        return result

    by_name: dict[str, list[Group]] = defaultdict(list)
    for group in await asyncio.gather(*(one(group) for group in groups)):
        by_name[str(group[0].metadata.get("source_name", "eval"))].append(group)
    return dict(by_name)


def _check(by_name: Any, metrics: Any, step: int) -> None:
    """Refuse what an evaluation function returned if it is not what one returns."""
    who = f"evaluation after step {step}: the function of --eval-function-path"
    wanted = "a dict of groups of Samples by the name of their set, or that and a dict of metrics"
    is_dict = (
        isinstance(by_name, dict) and by_name and all(isinstance(groups, list) for groups in by_name.values())
    )
    groups = [group for groups in by_name.values() for group in groups] if is_dict else []
    for group in groups:
        if not isinstance(group, list) or not group or not all(isinstance(one, Sample) for one in group):
            raise SampleError(f"{who} returned {type(group).__name__} for a group; wanted {wanted}")
    if not groups or not isinstance(metrics, dict):
        raise SampleError(f"{who} returned {str(by_name)[:60]}; wanted {wanted}, and at least one group")


def eval_params(run: RolloutRun, sample: Sample, sets: Mapping[str, EvalSet] | None = None) -> SamplingParams:
    """Return how an evaluation sample is drawn: as its set says, else the section `eval`, else `rollout`.

    Raises:
        SampleError: its prompt leaves no room in the context.
    """
    section, rollout = run.settings.eval, run.settings.rollout
    own = set_of(sample.metadata, sets or {})
    longest, context = longest_response(own, run.settings), longest_context(own, run.settings)
    if context is not None:
        longest = min(longest, context - sample.prompt_length)
        if longest < 1:
            raise SampleError(
                f"{sample.name} (evaluation): its prompt of {sample.prompt_length} tokens leaves no room in "
                f"eval_max_context_len, {context}; drop such prompts (--eval-max-prompt-len), or raise it"
            )
    return SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=_given(own.min_new_tokens, section.eval_min_new_tokens),
        temperature=_given(own.temperature, section.eval_temperature),
        top_p=_given(own.top_p, section.eval_top_p),
        top_k=_given(own.top_k, section.eval_top_k),
        stop=tuple(_given(own.stop, rollout.rollout_stop)),
        stop_token_ids=tuple(_given(own.stop_token_ids, rollout.rollout_stop_token_ids)),
        seed=(rollout.rollout_seed << 40) + (1 << 39) + (sample.index or 0),
        skip_special_tokens=_given(own.skip_special_tokens, rollout.rollout_skip_special_tokens),
    )


def _given(*values: Any) -> Any:
    """Return the first value that is given."""
    return next((value for value in values if value is not None), None)
