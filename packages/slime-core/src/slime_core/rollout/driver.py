"""The default rollout: a task a group; over-sample, filter, abort the rest."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from slime_core.config.sections import RewardSection, RolloutSection
from slime_core.errors import DataError, PluginError, RewardError, SampleError, SlimeError
from slime_core.protocols import GenerateContext, RolloutEngine, SamplingParams
from slime_core.rewards.results import RewardFailure
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.execution import Generator
from slime_core.sample import Group, Sample, Status

if TYPE_CHECKING:
    from slime_core.run import Run

logger = logging.getLogger(__name__)


async def rollout(run: Run, step: int) -> list[Group]:
    """Generate and score `rollout_batch_size` groups that the filter keeps.

    Prompts are taken in waves of `over_sampling_batch_size`. Groups are decided on in the order of their prompts,
    and the next wave begins when all are decided on, so that the same run always trains on the same samples; with
    `rollout_in_completion_order` the first to finish are kept and a wave begins as soon as it is sure to be needed,
    which is faster and is not reproducible. Once the batch is full, what is still under way is aborted: from
    then on generators get `abort` from every request, also from those that they begin later.

    Groups that are left over (surplus or aborted) go to the buffer, so that no prompt is lost: with
    `partial_rollout` as they are (see `leftovers`), otherwise as fresh prompts.

    Raises:
        DataError: the filter dropped so much that `dynamic_sampling_max_waves` waves did not fill the batch.
        RewardError: a reward failed and `on_reward_error` is `stop`.
    """
    target = run.sizes.rollout_batch_size
    kept: list[Group] = []
    drops: Counter[str] = Counter()
    tasks: dict[asyncio.Task[Group], int] = {}
    failure: str | None = None
    waves = 0
    engine = cast(RolloutEngine, AbortableEngine(run.engine))  # it passes all else on
    try:
        while len(kept) < target:
            if not tasks or (run.in_completion_order and len(kept) + len(tasks) < target):
                if waves == run.max_waves:
                    raise DataError(_starved(step, waves, len(kept), target, drops, failure))
                waves += 1
                for group in run.take(run.sizes.over_sampling_batch_size):
                    task = asyncio.create_task(
                        run_group(run, group, params_of=run.sampling_params, engine=engine)
                    )
                    tasks[task] = group[0].index or 0
                continue
            task = await _next_decided(tasks, in_order=not run.in_completion_order)
            del tasks[task]
            group = task.result()
            reason = _reason(run, group)
            if reason is None:
                kept.append(group)
            else:
                drops[reason] += 1
                failure = failure or next((sample.failure for sample in group if sample.failure), None)
            run.report("rollout", len(kept), target)
        if tasks:
            await engine.abort()
            run.keep_for_later(await asyncio.gather(*sorted(tasks, key=tasks.__getitem__)))
    finally:
        for task in tasks:
            task.cancel()
    run.record_drops(drops)
    return sorted(kept, key=lambda group: group[0].index or 0)


def _reason(run: Run, group: Group) -> str | None:
    """Ask the filter; whatever else it raises becomes an error that names the group's first sample."""
    try:
        return run.drop_reason(group)
    except (SlimeError, GeneratorExit):
        raise
    except BaseException as error:
        what = f"the filter {run.settings.section(RolloutSection).dynamic_sampling_filter_path}"
        raise SampleError(f"{group[0].name}: {what} raised {type(error).__name__}: {error}") from error


async def _next_decided(tasks: dict[asyncio.Task[Group], int], *, in_order: bool) -> asyncio.Task[Group]:
    """Wait for the first group by prompt or by completion; an error of any group is raised at once."""
    first = min(tasks, key=tasks.__getitem__)
    waiting = set(tasks)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=tasks.__getitem__):
            task.result()  # a failure need not wait for its turn
            if not in_order:
                return task
        if first.done():
            return first


async def run_group(
    run: Run,
    group: Group,
    *,
    params_of: Callable[[Sample], SamplingParams],
    engine: RolloutEngine | None = None,
    evaluation: bool = False,
) -> Group:
    """Generate and score the samples of one group; an execution that fans out adds its samples to the group.

    Args:
        run: of the group.
        group: as it was taken.
        params_of: how a sample is drawn.
        engine: what generators are given, if it is not the run's engine itself; see `AbortableEngine`.
        evaluation: whether it is not for training.
    """
    context = GenerateContext(engine=engine or run.engine, tokenizer=run.tokenizer, evaluation=evaluation)
    named = [
        asyncio.create_task(run_sample(run, context, sample, params_of(sample)), name=sample.name)
        for sample in group
    ]
    executions = await asyncio.gather(*named)
    samples = [sample for execution in executions for sample in execution]
    if any(sample.status is Status.ABORTED for sample in samples):
        return samples
    if run.scorer is not None:
        await run.score(samples)
    return samples


async def run_sample(
    run: Run, context: GenerateContext, sample: Sample, params: SamplingParams
) -> list[Sample]:
    """Run one execution; returns its samples. One that fans out and is aborted begins anew: its prompt alone is returned."""
    if sample.status in (Status.COMPLETED, Status.TRUNCATED):
        return [sample]
    if sample.session_id is None:
        sample.session_id = str(uuid.UUID(int=(run.seed << 64) | (sample.index or 0)))
    prompt, begin = reset(sample), time.perf_counter()
    samples = await _generator(run, sample).execute(context, sample, params)
    if len(samples) > 1 and any(one.status is Status.ABORTED for one in samples):
        prompt.status = Status.ABORTED
        return [prompt]
    for one in samples:
        one.timings["generate"] = one.timings.get("generate", 0.0) + time.perf_counter() - begin
    return samples


def _generator(run: Run, sample: Sample) -> Generator:
    """Return the sample's own generator, if it has one, or the run's."""
    section = run.settings.section(RolloutSection)
    function, name = run.generate, section.custom_generate_function_path
    if sample.generate_function_path is not None:
        name = sample.generate_function_path
        try:
            function = run.registry.resolve("slime.generators", name)
        except PluginError as error:
            raise SampleError(f"{sample.name}: generate_function_path: {error}") from error
    return Generator(
        name=name,
        function=function,
        vocab_size=run.vocab_size,
        max_context_len=section.rollout_max_context_len,
    )


def leftovers(groups: Sequence[Group], section: RolloutSection) -> list[Group]:
    """Return surplus and aborted groups as they are to be generated in a later step.

    With partial rollout as they are, but for those that hold a failed sample; all others as fresh prompts. A failed
    sample is no reason to drop a group that was not decided on: which of the surplus got so far depends on the clock.
    """
    if section.partial_rollout and section.mask_offpolicy_in_partial_rollout:
        for sample in (sample for group in groups for sample in group):
            sample.loss_mask = [0] * sample.response_length
    return [
        list(group) if section.partial_rollout and failure_of(group) is None else fresh(group)
        for group in groups
    ]


def fresh(group: Group) -> Group:
    """Return the prompts of a group, one for each execution, however many samples it fanned out into."""
    prompts: dict[int | None, Sample] = {}
    for sample in group:
        prompts.setdefault(sample.index, reset(sample))
    return list(prompts.values())


def training_params(sample: Sample, section: RolloutSection) -> SamplingParams:
    """Return how a training sample is drawn; its seed depends on the run's seed and the sample's index alone."""
    return SamplingParams(
        max_new_tokens=most_new_tokens(sample, section),
        min_new_tokens=section.rollout_min_new_tokens,
        temperature=section.rollout_temperature,
        top_p=section.rollout_top_p,
        top_k=section.rollout_top_k,
        stop=tuple(section.rollout_stop),
        stop_token_ids=tuple(section.rollout_stop_token_ids),
        seed=(section.rollout_seed << 40) + (sample.index or 0),
        skip_special_tokens=section.rollout_skip_special_tokens,
    )


def most_new_tokens(sample: Sample, section: RolloutSection) -> int:
    """Return the most tokens that a response may have.

    Raises:
        SampleError: its prompt leaves no room for any.
    """
    context = section.rollout_max_context_len
    if context is None:
        return section.rollout_max_response_len
    if sample.prompt_length >= context:
        raise SampleError(
            f"{sample.name}: its prompt of {sample.prompt_length} tokens leaves no room in rollout_max_context_len, "
            f"{context}; drop such prompts (--rollout-max-prompt-len), or raise it"
        )
    return min(section.rollout_max_response_len, context - sample.prompt_length)


def reset(sample: Sample) -> Sample:
    """Return the sample as a fresh prompt, its response forgotten."""
    return Sample(
        index=sample.index,
        group_index=sample.group_index,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        multimodal_inputs=sample.multimodal_inputs,
        multimodal_train_inputs=sample.multimodal_train_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        metadata=sample.metadata,
        train_metadata=sample.train_metadata,
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
    )


async def score(samples: Sequence[Sample], scorer: Scorer, section: RewardSection) -> None:
    """Score samples in place. One that cannot be scored becomes FAILED with its reason.

    Raises:
        RewardError: a reward failed and `on_reward_error` is `stop`; names the sample.
    """
    if section.group_rm:
        results = await scorer.score_group(list(samples))
    else:
        results = await asyncio.gather(*(scorer.score(sample) for sample in samples))
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, RewardFailure):
            error = fail(sample, result.message)
            logger.warning("%s", error)
            if section.on_reward_error == "stop":
                raise error
        else:
            sample.reward = result.value
            sample.timings["reward"] = result.seconds


def fail(sample: Sample, message: str) -> RewardError:
    """Mark a sample FAILED for a reason that names it, and return the error that says so."""
    sample.status, sample.failure = Status.FAILED, message
    return RewardError(message)


def _starved(step: int, waves: int, kept: int, target: int, drops: Counter[str], failure: str | None) -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in drops.most_common(5))
    todo = "loosen the filter, change the data, or raise --dynamic-sampling-max-waves"
    if failure is not None:
        mend = f"mend the reward, whose first failure is: {failure}"
        todo = mend if len(drops) == 1 else f"{todo}, or {mend}"
    return f"step {step}: after {waves} waves of sampling {kept} of {target} groups are kept; dropped: {reasons or 'none'}; {todo}"


def failure_of(group: Group) -> str | None:
    """Return the reason to drop a group that holds a failed sample, None where there is none."""
    return "reward_error" if any(sample.status is Status.FAILED for sample in group) else None
