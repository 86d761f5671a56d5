"""The functions of `slime.rollout.sglang_rollout`: generating and scoring samples, groups and whole rollouts of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from slime_core import samples
from slime_core.errors import PluginError, RewardError
from slime_core.protocols import SamplingParams
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.group import run_generator, run_group, run_sample
from slime_core.rollout.rollouts.sft import sft
from slime_core.run.evaluation import evaluate
from slime_core.samples import Group, Status

from slime_compat.engine.requests import next_seed, sampling_params
from slime_compat.views.running.loop import in_run
from slime_compat.views.running.loop import run as run_coroutine
from slime_compat.views.running.runtime import Runtime, current
from slime_compat.views.samples.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_compat.views.samples.sample import ReferenceSample as Sample
from slime_compat.views.samples.sample import viewed


@in_run
async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """Generate the response of a sample, or what is missing of an aborted one, by the run's engine."""
    runtime = current("generate")
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise PluginError(f"generate: {sample.name} is {sample.status}; wanted pending or aborted")
    if not sample.tokens:
        sample.tokens = runtime.context.tokenizer.encode(str(sample.prompt))
    await runtime.context.turn(sample, _params(runtime, sample, sampling_params))
    runtime.own.update(sample.weight_versions)
    return viewed(sample)


@in_run
async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate a sample by the run's generator, and score it; several where its execution fans out."""
    runtime = current("generate_and_rm")
    run = _run(runtime, "generate_and_rm")
    _encode(runtime, [sample])
    params = _params(runtime, sample, sampling_params)
    made = await run_sample(run, runtime.context, run_generator(run), sample, params)
    unscored = [one for one in made if one.reward is None and one.status is not Status.FAILED]
    is_aborted = any(one.status is Status.ABORTED for one in made)
    if unscored and not is_aborted and not run.settings.reward.group_rm:
        await run.score(unscored, evaluation=evaluation)
    views = [viewed(one) for one in made]
    return views[0] if len(views) == 1 else views


@in_run
async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Generate and score the samples of a group."""
    runtime = current("generate_and_rm_group")
    run = _run(runtime, "generate_and_rm_group")
    _encode(runtime, group)
    made = await run_group(
        run,
        list(group),
        params_of=lambda sample: _params(runtime, sample, sampling_params),
        engine=runtime.context.engine,
        over=runtime.context.over,
        evaluation=evaluation or runtime.context.evaluation,
        max_context_len=runtime.context.max_context_len,
    )
    return [viewed(one) for one in made]


@in_run
async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], Any] | None = None
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Run the default rollout of the step; returns its output, and aborted groups, which the run keeps itself: none."""
    runtime = current("generate_rollout_async")
    groups = await _run(runtime, "generate_rollout_async").next_groups(runtime.step)
    return RolloutFnTrainOutput(samples=[[viewed(one) for one in group] for group in groups]), []


@in_run
async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Generate and score the held-out prompts of the run; returns their samples by evaluation set."""
    runtime = current("eval_rollout")
    run = _run(runtime, "eval_rollout")
    by_name = await evaluate(run, runtime.step, getattr(run, "eval_source", None))
    return RolloutFnEvalOutput(data={name: _data(run, groups) for name, groups in by_name.items()}), []


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run the default rollout, or the default evaluation, from a plain function."""
    if evaluation:
        return run_coroutine(eval_rollout(args, rollout_id))[0]
    return run_coroutine(generate_rollout_async(args, rollout_id))[0]


def sft_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    """Make samples of the data's own answers; `slime.rollout.sft_rollout.generate_rollout`.

    Raises:
        PluginError: it is to evaluate.
    """
    if evaluation:
        raise PluginError(
            "sft_rollout: found evaluation=True; wanted an --eval-function-path of its own, or no evaluation"
        )
    runtime = current("sft_rollout", args)
    groups = run_coroutine(sft(_run(runtime, "sft_rollout"), runtime.step))
    return [[viewed(one) for one in group] for group in groups]


@in_run
async def abort(args: Any, rollout_id: int) -> list[Group]:
    """End what is in flight, and wait for what `GenerateState` has pending; returns its groups under `--partial-rollout`, else none.

    Samples that were not finished are ABORTED, also where others wait for them.
    """
    runtime = current("abort")
    engine: Any = runtime.context.engine
    await getattr(engine, "engine", engine).abort()
    if runtime.state is None:
        return []
    runtime.state.aborted = True
    groups = await asyncio.gather(*runtime.state.pendings)
    runtime.state.pendings = set()
    return list(groups) if args.partial_rollout else []


def get_model_url(args: Any, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Return where a model answers; here it is always the run's own."""
    return current("get_model_url", args).server.url + endpoint


def _data(run: RolloutRun, groups: list[Group]) -> dict[str, Any]:
    done = [viewed(one) for group in groups for one in group]
    failed = next((one for one in done if one.failure is not None), None)
    if failed is not None:
        raise RewardError(f"{failed.name} (evaluation): {failed.failure}")
    key = run.settings.reward.eval_reward_key or run.settings.reward.reward_key
    return {
        "rewards": [one.reward_value(key) for one in done],
        "truncated": [one.status is Status.TRUNCATED for one in done],
        "samples": done,
    }


def _run(runtime: Runtime, what: str) -> RolloutRun:
    if runtime.run is None:
        raise PluginError(
            f"{what} needs the whole run: call it in a rollout or evaluation function; a generate function has `generate`"
        )
    return runtime.run


def _params(runtime: Runtime, sample: samples.Sample, given: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a sample's request, with a seed of the sample's own."""
    params = runtime.params
    if params is None and runtime.run is not None:
        params = runtime.run.sampling_params(sample)
    seed = next_seed(params, runtime.n_requests if runtime.run is None else 0)
    runtime.n_requests += 1
    return sampling_params(given, default_seed=seed)


def _encode(runtime: Runtime, given: list[Sample]) -> None:
    """Give ids to prompts that a function brought as text."""
    for sample in given:
        if not sample.tokens and isinstance(sample.prompt, str):
            sample.tokens = runtime.context.tokenizer.encode(sample.prompt)
