"""One prompt group: generating and scoring its samples, and the forms in which a later step goes on with it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.config.functions import resolve_function
from slime_core.config.sections import RewardSection, RolloutSection
from slime_core.errors import PluginError, RewardError, SampleError
from slime_core.protocols import GenerateContext, Generates, SamplingParams
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.rewards.scorer import Result, Scorer
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.execution import Generator
from slime_core.rollout.recorded_engine import RecordedEngine
from slime_core.rundir.events import REWARDS, EventLog
from slime_core.runtime.clock import now
from slime_core.runtime.eager import results, start_now
from slime_core.runtime.replaced import replaced
from slime_core.samples import Group, Sample, Status

logger = logging.getLogger(__name__)

#: Key of `Sample.metadata`: the first step, counted from 0, that gave a partial response tokens.
START = "start_rollout_id"


async def run_group(
    run: RolloutRun,
    group: Group,
    *,
    params_of: Callable[[Sample], SamplingParams],
    engine: Generates | None = None,
    over: asyncio.Event | None = None,
    evaluation: bool = False,
    max_context_len: int | None = None,
) -> Group:
    """Generate and score the samples of one group; an execution that fans out adds its samples to the group.

    Args:
        run: of the group.
        group: as it was taken.
        params_of: how a sample is drawn.
        engine: what generators are given; None gives them the run's engine behind its limit, to be aborted by nobody.
        over: set once nobody needs the group any more; None where that is not to be.
        evaluation: whether it is not for training.
        max_context_len: most tokens of prompt and response in an evaluation; in training `rollout_max_context_len` holds.
    """
    context = GenerateContext(
        engine=engine or AbortableEngine(run.engine, run.concurrency),
        tokenizer=run.tokenizer,
        capabilities=run.engine.capabilities,
        evaluation=evaluation,
        max_context_len=max_context_len,
        services=run.services,
        over=over or asyncio.Event(),
    )
    generator = run_generator(run)
    executions = await results(
        start_now(run_sample(run, context, generator, sample, params_of(sample)), name=sample.name)
        for sample in group
    )
    samples = [sample for execution in executions for sample in execution]
    generator.check_numbers(samples)
    generator.check_executions(samples)
    if any(sample.status is Status.ABORTED for sample in samples):
        return samples
    if unscored := _unscored(run, samples, generator):
        await run.score(unscored, evaluation=evaluation)
    return samples


def _unscored(run: RolloutRun, samples: list[Sample], generator: Generator) -> list[Sample]:
    """Return the samples that a reward is to be asked about: no failed one, and none that a reward has scored already, as it
    may have in a step that the group was surplus of. A group reward is asked about all of a group or, where one failed, none.
    """
    if run.scorer is None:
        return []
    found = [
        one
        for one in samples
        if one.status is not Status.FAILED
        and run.scorer.asks(one)
        and (one.reward is None or _is_replaced(run, one, generator))
    ]
    if found and run.settings.reward.group_rm:
        return samples if failure_of(samples) is None else []
    return found


def _is_replaced(run: RolloutRun, sample: Sample, generator: Generator) -> bool:
    """Say whether a reward is asked for all the same where a sample has one: a generator left it, and not one that scores what it wants."""
    return "reward" not in sample.timings and not generator_of(run, sample, generator).is_free


async def run_sample(
    run: RolloutRun, context: GenerateContext, generator: Generator, sample: Sample, params: SamplingParams
) -> list[Sample]:
    """Run one execution; returns its samples. One that fans out and is aborted begins anew: its prompt alone is returned.

    One whose generator asks a reward itself, and cannot have it, is a failed prompt where `on_reward_error` is `drop`.

    Args:
        run: of the sample.
        context: of its group.
        generator: the run's, for samples that name none of their own.
        sample: to generate, or to go on with.
        params: how it is drawn.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        return [sample]
    if sample.session_id is None:
        sample.session_id = _session_id(run.settings.rollout.rollout_seed, sample.index or 0)
    generator = generator_of(run, sample, generator)
    if run.events.is_on:
        recorded = RecordedEngine(context.engine, run.events, sample, evaluation=context.evaluation)
        context = replaced(context, engine=recorded)
    prompt, begin = copy.copy(sample), now()
    prompt.tokens, prompt.response_length = sample.tokens[: sample.prompt_length], 0
    try:
        samples = await generator.execute(context, sample, params)
    except RewardError as error:
        if run.settings.reward.on_reward_error == "stop":
            raise
        samples = [reset(prompt)]
        logger.warning("%s", fail(samples[0], f"{sample.name}: {error}"))
    if len(samples) > 1 and any(one.status is Status.ABORTED for one in samples):
        prompt = reset(prompt)
        prompt.status = Status.ABORTED
        return [prompt]
    seconds = now() - begin
    for one in samples:
        one.timings["generate"] = one.timings.get("generate", 0.0) + seconds
    if samples[0].status is Status.ABORTED or not run.user_hooks.sample_hooks:
        return samples
    return [await _after_hooks(run, one, evaluation=context.evaluation) for one in samples]


def _session_id(seed: int, index: int) -> str:
    """Return 128 bits as the text of a UUID: the run's seed, then the sample's index."""
    digits = f"{seed:016x}{index:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


async def _after_hooks(run: RolloutRun, sample: Sample, *, evaluation: bool) -> Sample:
    """Let the sample hooks have a sample, once: when its generation is over."""
    rollout_id = None if evaluation else run.generating_step - 1
    finished = await run.user_hooks.finish(sample, rollout_id=rollout_id, evaluation=evaluation)
    finished.check(vocab_size=run.vocab_size)
    return finished


def run_generator(run: RolloutRun) -> Generator:
    """Return the run's generator, with the checks of what it returns."""
    return _checked(run, run.settings.rollout.custom_generate_function_path, run.generate)


def generator_of(run: RolloutRun, sample: Sample, default: Generator) -> Generator:
    """Return the generator of a sample: its own if it names one, else the run's."""
    return default if sample.generate_function_path is None else _own_generator(run, sample)


def _checked(run: RolloutRun, name: str, function: Callable[..., Any]) -> Generator:
    return Generator(
        name=name,
        function=function,
        vocab_size=run.vocab_size,
        max_context_len=run.settings.rollout.rollout_max_context_len,
        engine_context_len=run.engine_context_len,
        is_free=getattr(function, "is_free", False),
    )


def _own_generator(run: RolloutRun, sample: Sample) -> Generator:
    name = sample.generate_function_path
    assert name is not None
    try:
        plugin = run.registry.find("slime.generators", name)
        if inspect.isclass(run.registry.load(plugin)):
            told = f"{name} is a class, which is built for a whole run; choose it by --custom-generate-function-path"
            raise SampleError(f"{sample.name}: generate_function_path: {told}")
        function = resolve_function(
            run.settings, run.registry, "slime.generators", name, where=f"options of {name}", explicit={}
        )
    except PluginError as error:
        raise SampleError(f"{sample.name}: generate_function_path: {error}") from error
    return _checked(run, name, function)


def leftovers(
    groups: Sequence[Group], section: RolloutSection, *, given: Sequence[Group], step: int
) -> list[Group]:
    """Return surplus and aborted groups in the form in which a later step generates them.

    Samples that have tokens remember in `metadata["start_rollout_id"]` the first step, counted from 0, that gave them some.

    With partial rollout as they are, but for those that hold a failed sample; all others as fresh prompts of what was
    submitted: what a generator wrote into a sample, such as its reward or a record, is of a response that is forgotten. A
    failed sample is no reason to drop a group that was not decided on: which of the surplus got so far depends on the clock.

    Args:
        groups: as they are.
        section: of the run.
        given: the same groups as they were submitted.
        step: that they were generated in.
    """
    mask_so_far(groups, section)
    for sample in (sample for group in groups for sample in group):
        if section.partial_rollout and sample.response_length:
            sample.metadata = {START: step - 1} | sample.metadata
    return [
        list(group) if section.partial_rollout and failure_of(group) is None else fresh(submitted)
        for group, submitted in zip(groups, given, strict=True)
    ]


def mask_so_far(groups: Sequence[Group], section: RolloutSection) -> None:
    """Leave the tokens that aborted groups have out of the loss, where `mask_offpolicy_in_partial_rollout` is on."""
    if section.partial_rollout and section.mask_offpolicy_in_partial_rollout:
        for sample in (sample for group in groups for sample in group):
            sample.loss_mask = [0] * sample.response_length


def fresh(group: Group) -> Group:
    """Return the prompts of a group, one for each execution, however many samples it fanned out into."""
    prompts: dict[int | None, Sample] = {}
    for sample in group:
        prompts.setdefault(sample.index, reset(sample))
    return list(prompts.values())


def oldest_version(group: Group, *, default: int) -> int:
    """Return the oldest weights that generated a token of a group; `default` where none did, or versions are no numbers."""
    versions = [
        sample.weight_versions[0] for sample in group if sample.response_length and sample.weight_versions
    ]
    return min((int(version) for version in versions if version.isdecimal()), default=default)


def training_params(
    sample: Sample, section: RolloutSection, common: SamplingParams | None = None
) -> SamplingParams:
    """Return how a training sample is drawn; its seed depends on the run's seed and the sample's index alone.

    Args:
        sample: to draw.
        section: of the run.
        common: `common_params` of the section, for who has them at hand.
    """
    return replaced(
        common or common_params(section),
        max_new_tokens=most_new_tokens(sample, section),
        seed=(section.rollout_seed << 40) + (sample.index or 0),
    )


def common_params(section: RolloutSection) -> SamplingParams:
    """Return how all training samples are drawn, but for the seed and the length of each."""
    return SamplingParams(
        max_new_tokens=section.rollout_max_response_len,
        min_new_tokens=section.rollout_min_new_tokens,
        temperature=section.rollout_temperature,
        top_p=section.rollout_top_p,
        top_k=section.rollout_top_k,
        stop=tuple(section.rollout_stop),
        stop_token_ids=tuple(section.rollout_stop_token_ids),
        skip_special_tokens=section.rollout_skip_special_tokens,
    )


def most_new_tokens(sample: Sample, section: RolloutSection) -> int:
    """Return the maximal number of response tokens.

    Raises:
        SampleError: its prompt leaves no room for any.
    """
    context = section.rollout_max_context_len
    if context is None:
        return section.rollout_max_response_len
    if why := _no_room(sample, section):
        raise SampleError(f"{sample.name}: {why}")
    return min(section.rollout_max_response_len, context - sample.prompt_length)


def fail_without_room(run: RolloutRun, group: Group) -> bool:
    """Mark the training samples FAILED whose prompts leave no room for a response, so that the dispatcher drops the group; say
    whether there are such. A long row, which may be looked at only when its turn comes, ends no run.
    """
    told = [(sample, why) for sample in group if (why := _no_room(sample, run.settings.rollout))]
    for sample, why in told:
        fail(sample, f"{run.where(sample)}: {why}")
    if told:
        logger.warning("%s; its group is dropped", told[0][0].failure)
    return bool(told)


def _no_room(sample: Sample, section: RolloutSection) -> str | None:
    """Return why no response of a prompt can have a token; None where one can."""
    context = section.rollout_max_context_len
    if context is None or sample.prompt_length < context:
        return None
    return (
        f"its prompt of {sample.prompt_length} tokens leaves no room in rollout_max_context_len, {context}; drop such prompts "
        "(--rollout-max-prompt-len), or raise it"
    )


def reset(sample: Sample) -> Sample:
    """Return the sample as a fresh prompt, its response forgotten, and the step that began it."""
    return Sample(
        index=sample.index,
        group_index=sample.group_index,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        multimodal_inputs=sample.multimodal_inputs,
        multimodal_train_inputs=sample.multimodal_train_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        metadata={key: value for key, value in sample.metadata.items() if key != START},
        train_metadata=sample.train_metadata,
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
    )


async def score(
    samples: Sequence[Sample],
    scorer: Scorer,
    section: RewardSection,
    *,
    events: EventLog,
    evaluation: bool = False,
) -> None:
    """Score samples in place, and tell how long each call took. One that cannot be scored becomes FAILED with its reason.

    Raises:
        RewardError: a reward failed and `on_reward_error` is `stop`; names the sample, and waits for no other.
    """

    def tell(begin: float, worker_s: float, failed: bool, group: int | None, sample: int | None) -> None:
        events.span(
            "reward",
            lane=REWARDS,
            begin=begin,
            seconds=now() - begin,
            sample=sample,
            group=group,
            evaluation=evaluation,
            worker_s=worker_s,
            failed=failed,
        )

    def take(sample: Sample, result: Result) -> None:
        if isinstance(result, RewardFailure):
            error = fail(sample, result.message)
            logger.warning("%s", error)
            if section.on_reward_error == "stop":
                raise error
        else:
            sample.reward = result.value
            sample.timings["reward"] = result.seconds

    async def one(sample: Sample) -> None:
        begin = now()
        result = await scorer.score(sample)
        if events.is_on:
            worker_s = result.seconds if isinstance(result, Reward) else None
            tell(begin, worker_s or 0.0, worker_s is None, sample.group_index, sample.index)
        take(sample, result)

    if not section.group_rm:
        await results(start_now(one(sample)) for sample in samples)
        return
    begin = now()
    scored = await scorer.score_group(list(samples))
    seconds = [result.seconds for result in scored if isinstance(result, Reward)]
    tell(begin, sum(seconds), len(seconds) < len(scored), samples[0].group_index, None)
    for sample, result in zip(samples, scored, strict=True):
        take(sample, result)


def fail(sample: Sample, message: str) -> RewardError:
    """Mark a sample FAILED for a reason that names it, and return the error that says so."""
    sample.status, sample.failure = Status.FAILED, message
    return RewardError(message)


def failure_of(group: Group) -> str | None:
    """Return the reason to drop a group that holds a failed sample, None where there is none."""
    return "reward_error" if any(sample.status is Status.FAILED for sample in group) else None
