"""`slime check`: everything about a recipe that can be known without starting it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence

from rich.console import Console

from slime_core.checks.chosen_plugins import chosen
from slime_core.cli.arguments import read_checked, translation_of, wants_help
from slime_core.cli.memory import DEVICE_MEMORY, lines, predicted, said, taken
from slime_core.config.build import BuildContext
from slime_core.config.derive import batch_sizes
from slime_core.config.settings import Settings
from slime_core.data.make_source import make_source, prompts_of
from slime_core.data.mixed_source import MixedSource
from slime_core.data.prompt_source import PromptSource
from slime_core.errors import ConfigError, DataError, Problem, SampleError
from slime_core.files.json_text import shown
from slime_core.plugins.registry import Registry
from slime_core.protocols import DataSource
from slime_core.rewards.results import RewardFailure
from slime_core.rewards.reward_keys import check_reward_keys
from slime_core.rewards.scorer import Result, Scorer
from slime_core.run.assemble import algorithm, make_scorer, resolve_functions
from slime_core.run.build import make_build
from slime_core.run.sources import make_sources
from slime_core.rundir.served_models import wanted_models
from slime_core.samples import Group, Sample, Status

HELP = """usage: slime check RECIPE.toml ... [--flag value ...] [--device-memory-gb N]

Checks that flags, names and files are there, that every chosen function can be called as it will be, that the engine
runs the model, that prompts fit, batch sizes multiply out, that trainer and engine fit into memory (of this machine's
GPUs, or of GPUs of `--device-memory-gb`; without any, of the machine), and that the reward gives gold answers full marks.
What is quick comes first, and is reported together. Starts no engine and no trainer. Exit status 2 if something is wrong."""

#: Prompts that are looked at.
PROMPTS = 32
#: Ways to write a gold answer that a reward may expect.
FORMS = ("{label}", "\\boxed{{{label}}}", "Answer: {label}", "#### {label}")
#: Gold answers that are shown of those that fail.
SHOWN = 5


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    console = Console(soft_wrap=True, highlight=False)
    argv, memory_gb = taken(argv, DEVICE_MEMORY)
    registry = Registry.from_environment()
    stages = read_checked(argv, registry)
    if (translation := translation_of(argv, registry)) is not None:
        console.print(
            f"[green]ok[/green]  read by {translation.origin}; {len(translation.notes)} notes on flags: slime config show"
        )
    console.print("[green]ok[/green]  settings, names and files")
    for stage in stages:
        if stage.name:
            console.print(f"[bold]stage {stage.name}[/bold]")
        _check(console, stage.beforehand, registry, memory_gb)
    return 0


def _check(console: Console, settings: Settings, registry: Registry, memory_gb: float | None) -> None:
    """Check one run.

    Raises:
        SlimeError: something is wrong with it.
    """
    build = make_build(settings, registry)
    resolve_functions(settings, registry)
    make_scorer(settings, registry)
    console.print("[green]ok[/green]  every plugin imports, its signature and its options fit")
    for choice in chosen(settings, registry):
        adapter = registry.adapter(registry.find(choice.group, choice.reference), flag=choice.flag)
        if adapter is not None:
            console.print(
                f"[green]ok[/green]  {choice.setting} {choice.reference}: written for another system, called by {adapter.reference}"
            )
    console.print("[green]ok[/green]  the engine runs the model")
    sizes = batch_sizes(settings)
    console.print(
        f"[green]ok[/green]  {sizes.rollout_batch_size} prompts x {sizes.n_samples_per_prompt} samples = "
        f"{sizes.global_batch_size} x {sizes.num_steps_per_rollout} optimizer steps"
    )
    for told in registry.hooks.slime_placement(build=build):
        for line in told:
            console.print(f"[green]ok[/green]  {line}")
    source, held_out = make_sources(build)
    if held_out is not None:
        console.print(f"[green]ok[/green]  {len(held_out)} held-out prompts")
    scorer_of = functools.partial(make_scorer, settings, registry)
    asyncio.run(check_reward_keys(settings, scorer_of, prompts_of(source)))
    samples = _first_of_groups(build, source)
    _lengths(console, settings, samples, len(source))
    _memory(console, settings, registry, memory_gb, samples)
    asyncio.run(_gold(console, settings, registry, samples))


def _first_of_groups(build: BuildContext, source: DataSource) -> list[Sample]:
    """Return the first sample of each of the first groups; of files no others are made, of which there may be any number."""
    n, n_groups = build.settings.rollout.n_samples_per_prompt, min(PROMPTS, len(source) or PROMPTS)
    if not isinstance(source, PromptSource | MixedSource) or n == 1:
        return [group[0] for group in source.take(n_groups)]
    alone = build.settings.having("rollout", "n_samples_per_prompt", 1, origin="slime check")
    groups = make_source(dataclasses.replace(build, settings=alone)).take(n_groups)
    for number, group in enumerate(groups):
        group[0].index = number * n
    return [group[0] for group in groups]


def _lengths(console: Console, settings: Settings, samples: list[Sample], total: int) -> None:
    rollout = settings.rollout
    longest = max(len(sample.tokens) for sample in samples)
    needed, context = longest + rollout.rollout_max_response_len, rollout.rollout_max_context_len
    environment = settings.environment
    if environment.environment is not None:
        needed += environment.max_environment_tokens
    if context is not None:
        if longest >= context:
            raise DataError(
                f"a prompt of {longest} tokens leaves no room in rollout.rollout_max_context_len, {context}; drop such "
                "prompts (--rollout-max-prompt-len), or raise it"
            )
        needed = min(needed, context)
    limit = settings.train.max_tokens_per_gpu
    packed = "fits" if needed <= limit else "gets a micro-batch of its own, over"
    console.print(
        f"[green]ok[/green]  {total} prompts; of the first {len(samples)} the longest has {longest} tokens, "
        f"with its response it {packed} max_tokens_per_gpu {limit}"
    )


def _memory(
    console: Console,
    settings: Settings,
    registry: Registry,
    memory_gb: float | None,
    samples: list[Sample],
) -> None:
    """Say what trainer and engine take of memory.

    Raises:
        ConfigError: it is more than there is, however short the samples are; names the cheapest changes after which it is not.
    """
    prompt = max(len(sample.tokens) for sample in samples)
    prediction = predicted(settings, registry, memory_gb=memory_gb, prompt_tokens=prompt)
    if found := said(console, prediction):
        raise ConfigError(found)
    mark = "[green]ok[/green]" if prediction.fits else "[yellow]--[/yellow]"
    for line in lines(prediction):
        console.print(f"{mark}  memory: {line}")


async def _gold(console: Console, settings: Settings, registry: Registry, samples: list[Sample]) -> None:
    """Say whether the reward gives each label, written as an answer, full marks."""
    pool = make_scorer(settings, registry)
    labelled = [sample for sample in samples if sample.label is not None and pool.asks(sample)]
    if not labelled:
        return
    if names := {name for _, name in wanted_models(settings)}:
        console.print(
            f"[green]ok[/green]  the reward is not tried: the run itself serves {', '.join(sorted(names))}"
        )
        return
    await pool.start()
    try:
        attempts: list[dict[int, str | RewardFailure]] = []
        while len(attempts) < len(FORMS) and (not attempts or attempts[-1]):
            attempts.append(await _wrong(settings, pool, labelled, FORMS[len(attempts)]))
            _parts(settings, registry, labelled)
    finally:
        await pool.close()
    written, wrong = min(zip(FORMS, attempts, strict=False), key=lambda attempt: len(attempt[1]))
    in_every_form = [i for i in wrong if all(i in attempt for attempt in attempts)]
    if not in_every_form:
        how = (
            ", each in a form that its own reward wants"
            if wrong
            else f" written as {written.format(label='LABEL')!r}"
        )
        console.print(f"[green]ok[/green]  the reward accepts all {len(labelled)} gold answers{how}")
        return
    failures = [why for i in in_every_form if isinstance(why := wrong[i], RewardFailure)]
    if failures:
        raise DataError(
            f"the reward cannot score {len(failures)} of {len(labelled)} gold answers in any form: {failures[0].message}"
        )
    console.print(
        f"[yellow]warning[/yellow]  the reward refuses {len(in_every_form)} of {len(labelled)} gold answers in every "
        f"form that was tried; written as {written.format(label='LABEL')!r} (`slime rm try` shows more):"
    )
    for i in in_every_form[:SHOWN]:
        console.print(f"  {wrong[i]}", markup=False)


def _parts(settings: Settings, registry: Registry, scored: list[Sample]) -> None:
    """Refuse a reward that lacks a part that the estimator reads."""
    for part in algorithm(settings, registry).reward_parts:
        for sample in scored:
            try:
                if sample.reward is not None:
                    sample.reward_part(part)
            except SampleError as error:
                wanted = "a reward that has every part that the estimator reads"
                raise ConfigError([Problem("algorithm.advantage_estimator", str(error), wanted)]) from error


async def _wrong(
    settings: Settings, scorer: Scorer, labelled: list[Sample], form: str
) -> dict[int, str | RewardFailure]:
    """Return by position what is wrong with each gold answer, written in one form, that does not get full marks.

    To a group reward each is given as a group in which everybody answers so.
    """
    key = settings.reward.reward_key
    threshold = settings.eval.eval_pass_threshold
    for sample in labelled:
        sample.response, sample.status = form.format(label=sample.label), Status.COMPLETED
    if settings.reward.group_rm:
        n = settings.rollout.n_samples_per_prompt
        groups = [[dataclasses.replace(sample) for _ in range(n)] for sample in labelled]
        of_groups = await asyncio.gather(*map(scorer.score_group, groups))
        results = [_lowest(group, each, key) for group, each in zip(groups, of_groups, strict=True)]
    else:
        results = await asyncio.gather(*map(scorer.score, labelled))
    wrong: dict[int, str | RewardFailure] = {}
    for i, (sample, result) in enumerate(zip(labelled, results, strict=True)):
        if isinstance(result, RewardFailure):
            wrong[i] = result
            continue
        sample.reward = result.value
        if (value := _value(sample, key)) < threshold:
            details = result.value.get("details", "") if isinstance(result.value, dict) else ""
            wrong[i] = f"{sample.name}: label {sample.label!r} gets {value:g} {details}"
    return wrong


def _lowest(group: Group, results: Sequence[Result], key: str | None) -> Result:
    """Return the failure among the results of a group, or the lowest reward."""
    rewards: list[tuple[float, Result]] = []
    for sample, result in zip(group, results, strict=True):
        if isinstance(result, RewardFailure):
            return result
        sample.reward = result.value
        rewards.append((_value(sample, key), result))
    return min(rewards, key=lambda entry: entry[0])[1]


def _value(sample: Sample, key: str | None) -> float:
    try:
        return sample.reward_value(key)
    except SampleError as error:
        raise DataError(f"{error} (for the label {shown(sample.label)} as the answer)") from error
