"""Building the chosen data source, and checking that its prompts fit the run; problems name the row."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator

from slime_core.config.build import BuildContext
from slime_core.config.derive import FILE_SOURCE, SINGLE_TURN, choices, is_single_turn
from slime_core.config.eval_sets import EvalSet, eval_sets, has_sets, longest_context, longest_response
from slime_core.config.model_fit import context_limit
from slime_core.config.user_factories import made
from slime_core.data.mixed_source import MixedSource
from slime_core.data.prompt_source import PromptSource
from slime_core.data.promptless_source import PromptlessSource
from slime_core.errors import DataError, PluginError
from slime_core.files.json_text import shown
from slime_core.plugins.own_name import means
from slime_core.protocols import DataSource
from slime_core.runtime.progress import ON_TERMINAL
from slime_core.samples import Sample

logger = logging.getLogger(__name__)

#: Core's generators, which begin with the prompt's ids; those of others may render chat messages themselves.
_OF_IDS = (SINGLE_TURN, "slime-core/multi-turn")
#: The functions that call the generator for each sample, and the rollout that calls it in evaluations alone.
_DEFAULT, _SUPERVISED = "slime-core/default", "slime-core/sft"
#: Rows that a message names; of more it says how many.
_NAMED = 5


def make_source(build: BuildContext) -> DataSource:
    """Return the data source of a run, after checking that its first prompts fit: all of up to `prompt_source.CHECKED`.

    Raises:
        DataError: the data is not what the settings say; names the row.
    """
    name = build.settings.data.data_source_path
    if build.settings.data.disable_rollout_global_dataset and means(name, FILE_SOURCE):
        return PromptlessSource(build.settings.rollout.n_samples_per_prompt)
    logger.info(
        "reading prompts from %s", " ".join(build.settings.data.prompt_data) or name, extra=ON_TERMINAL
    )
    source: DataSource = made(build, "slime.sources", name, where="data.data_source_path")
    check_prompts(source, build)
    return source


def make_eval_source(build: BuildContext) -> DataSource | None:
    """Return the held-out prompts of a run, None where it has none; raises as `make_source` does."""
    section = build.settings.eval
    if section.eval_interval is None:
        if has_sets(section) or section.eval_data_source_path is not None:
            logger.warning("evaluation sets are given, and no --eval-interval: nothing is evaluated")
        return None
    if not has_sets(section) and section.eval_data_source_path is None:
        return None  # the function of `eval_function_path`, or of the rollout, has its own; `checks.settings` refuses others
    logger.info("reading held-out prompts", extra=ON_TERMINAL)
    held_out = dataclasses.replace(build, evaluation=True)
    name = section.eval_data_source_path or "file"
    source: DataSource = made(held_out, "slime.sources", name, where="eval.eval_data_source_path")
    check_prompts(source, held_out)
    _tell_of_copies(build)
    return source


def _tell_of_copies(build: BuildContext) -> None:
    """Warn of evaluation sets whose prompts have several samples that are all the same."""
    settings = build.settings
    if not is_single_turn(settings) or not means(settings.eval.eval_function_path, _DEFAULT):
        return  # what else has a say may be random
    for name, own in (eval_sets(settings, build.registry) or {"": EvalSet(path="-")}).items():
        n = own.n_samples_per_eval_prompt or settings.eval.n_samples_per_eval_prompt
        temperature = settings.eval.eval_temperature if own.temperature is None else own.temperature
        if n > 1 and temperature == 0 and own.custom_generate_function_path is None:
            logger.warning(
                "evaluation%s: n_samples_per_eval_prompt %d with temperature 0, which is greedy: the samples of a prompt are all "
                "the same, and every pass@k is pass@1; give --eval-temperature",
                f" {name}" if name else "", n,
            )  # fmt: skip


def prompts_of(source: DataSource) -> Iterator[Sample]:
    """Yield the prompts that a source holds, each as it is made; none of one that makes them as they are asked for."""
    if isinstance(source, PromptSource | MixedSource):
        yield from (sample for _, sample in source.prompts())


def check_prompts(source: DataSource, build: BuildContext) -> None:
    """Refuse prompts that leave no room for a response or that their generator cannot begin with, and rows whose metadata chooses
    a reward that is not there.

    Only the first prompts of a source that has a fixed sequence of them (`PromptSource.prompts`): what others hand out, and
    what comes later, is seen when it is generated.

    Args:
        source: as it was built, for training or, if `build.evaluation`, for evaluation.
        build: of the run.

    Raises:
        DataError: names the first such rows, and why.
    """
    if not isinstance(source, PromptSource | MixedSource):
        return
    refuse_rows(_misfits(source, build))


def refuse_rows(wrong: Iterable[str]) -> None:
    """Refuse rows of data; raises DataError, with what is wrong of each of the first, where there are any."""
    told = list(wrong)
    if told:
        more = [f"and {len(told) - _NAMED} rows more"] if len(told) > _NAMED else []
        raise DataError("\n".join(told[:_NAMED] + more))


def _misfits(source: PromptSource | MixedSource, build: BuildContext) -> Iterator[str]:
    limit_of, which = _prompt_limit(build), "eval" if build.evaluation else "rollout"
    known: dict[str, str | None] = {}
    forced = build.settings.reward.custom_rm_path is not None
    generator_of = _generators_of_ids(build)
    for place, sample in source.prompts():
        limit, setting = limit_of(sample)
        if not sample.tokens and (generator := generator_of(sample)):
            yield (
                f"{place}: found chat messages, which the generator {generator} does not render; wanted a prompt that is text; "
                "give --apply-chat-template, or choose a generator that renders messages"
            )
        if limit is not None and len(sample.tokens) > limit:
            yield (
                f"{place}: found a prompt of {len(sample.tokens)} tokens; wanted at most {limit}, which {setting} leaves; "
                f"drop such prompts (--{which}-max-prompt-len), or allow more"
            )
        name = None if forced else sample.metadata.get("rm_type")
        if name is not None:
            why = _no_reward(name, sample, build, known)
            if why is not None:
                yield f"{place}: metadata rm_type: found {shown(name)}; wanted the name of a reward: {why}"


def _generators_of_ids(build: BuildContext) -> Callable[[Sample], str | None]:
    """Return what tells of a prompt which generator needs its ids; None where nobody does, or nobody knows."""
    rollout, evaluation = build.settings.rollout, build.settings.eval
    chosen = rollout.custom_generate_function_path
    by_set: dict[str, str | None] = {}
    if build.evaluation:
        is_default = means(evaluation.eval_function_path, _DEFAULT)
        is_default = is_default and means(rollout.rollout_function_path, _DEFAULT, _SUPERVISED)
        sets = eval_sets(build.settings, build.registry)
        by_set = {name: own.custom_generate_function_path for name, own in sets.items()}
    else:
        is_default = means(rollout.rollout_function_path, _DEFAULT)

    def generator(sample: Sample) -> str | None:
        name = by_set.get(str(sample.metadata.get("source_name"))) or chosen
        return name if is_default and means(name, *_OF_IDS) else None

    return generator


def _no_reward(name: object, sample: Sample, build: BuildContext, known: dict[str, str | None]) -> str | None:
    """Return why a row's own reward is none; imports it, once."""
    if not isinstance(name, str):
        return "it is text"
    if name not in known:
        try:
            build.registry.resolve(choices(build.settings).reward_group, name)
            known[name] = None
        except PluginError as error:
            known[name] = str(error)
    return known[name]


def _prompt_limit(build: BuildContext) -> Callable[[Sample], tuple[int | None, str]]:
    """Return what tells of a prompt how many tokens it may have, and by which setting; None where nothing bounds it."""
    rollout = build.settings.rollout
    if not build.evaluation and means(rollout.rollout_function_path, _SUPERVISED):
        return lambda sample: (None, "")  # nothing is generated
    engine = context_limit(build)
    if not build.evaluation:
        context, longest = rollout.rollout_max_context_len, rollout.rollout_max_response_len
        bound = _bound("rollout", context, longest, engine)
        return lambda sample: bound
    sets = eval_sets(build.settings, build.registry)
    bounds = {
        name: _bound(
            "eval", longest_context(own, build.settings), longest_response(own, build.settings), engine
        )
        for name, own in {**sets, "": EvalSet(path="-")}.items()
    }
    return lambda sample: bounds.get(str(sample.metadata.get("source_name")), bounds[""])


def _bound(which: str, context: int | None, longest: int, engine: int | None) -> tuple[int | None, str]:
    """Return the most tokens of a prompt, and what says so."""
    if context is not None and (engine is None or context <= engine):
        return context - 1, f"{which}.{which}_max_context_len {context}"
    if engine is None:
        return None, ""
    if context is not None:
        return engine - 1, f"the engine's context of {engine} tokens"
    return (
        engine - longest,
        f"the engine's context of {engine} tokens with {which}_max_response_len {longest}",
    )
