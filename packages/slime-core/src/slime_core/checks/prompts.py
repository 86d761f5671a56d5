"""Checks of prompts: those that are trained on, and those that are held out."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.derive import FILE_SOURCE, is_single_turn
from slime_core.config.eval_sets import EvalSet, eval_sets, has_sets, longest_context, longest_response
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, Problem
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry

#: The rollout, and the evaluation, that nobody replaced.
_DEFAULT = "slime-core/default"


def prompt_problems(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield that there are no prompts to train on, or weights of files that are not given."""
    data = settings.data
    if data.disable_rollout_global_dataset:
        yield from _without_prompts(settings, registry)
        return
    if means(data.data_source_path, FILE_SOURCE) and not data.prompt_data:
        yield Problem(
            "data.prompt_data",
            "nothing",
            "a JSONL or Parquet file",
            "give --prompt-data, or another --data-source-path",
        )
    names = data.prompt_data[::2] if len(data.prompt_data) > 1 else []
    for name in data.prompt_data_weights:
        if name not in names:
            there = ", ".join(names) or "nothing: prompt_data has no names"
            yield Problem("data.prompt_data_weights", repr(name), f"names of prompt_data: {there}")


def _without_prompts(settings: Settings, registry: Registry) -> Iterator[Problem]:
    where, data = "data.disable_rollout_global_dataset", settings.data
    if data.prompt_data:
        yield Problem(where, f"it beside data.prompt_data {data.prompt_data!r}", "one of the two")
    source = data.data_source_path
    if not means(source, FILE_SOURCE):
        try:
            is_own = not registry.find("slime.sources", source).distribution
        except PluginError:  # which is said already
            return
        if not is_own:
            found = f"it beside data.data_source_path {source!r}, which has prompts of its own"
            yield Problem(where, found, "one of the two")
        return  # a source of somebody's own brings the prompts, and says how many there are
    if settings.run.num_rollout is None:
        yield Problem(
            "run.num_rollout", "nothing", "the number of steps", "without prompts there is no epoch"
        )
    is_default = means(settings.rollout.rollout_function_path, _DEFAULT)
    if is_default and is_single_turn(settings):
        wanted = "--custom-generate-function-path or --rollout-function-path"
        yield Problem(
            where, "it with the generator single-turn", wanted, "something has to bring the prompts"
        )


def evaluation_problems(settings: Settings) -> Iterator[Problem]:
    """Yield that there is nothing to evaluate on, or a file without its name."""
    evaluation = settings.eval
    files = evaluation.eval_prompt_data
    chosen = evaluation.eval_function_path, settings.rollout.rollout_function_path
    is_own = not all(means(function, _DEFAULT) for function in chosen)
    has_none = not has_sets(evaluation) and evaluation.eval_data_source_path is None
    if evaluation.eval_interval is not None and has_none and not is_own:
        yield Problem(
            "eval.eval_interval",
            "no evaluation set",
            "eval.eval_prompt_data, eval.eval_config or eval.eval_data_source_path",
        )
    if len(files) % 2:
        yield Problem("eval.eval_prompt_data", f"{len(files)} words", "name path [name path ...]")


def least_lengths(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield evaluation sets whose responses are to have more tokens than they may have."""
    evaluation = settings.eval
    if evaluation.eval_interval is None:
        return
    by_flag = ("eval.eval_min_new_tokens", evaluation.eval_min_new_tokens)
    for name, own in (eval_sets(settings, registry) or {"": EvalSet(path="-")}).items():
        where, least = by_flag
        if own.min_new_tokens is not None:
            where, least = (
                f"eval.eval_config ({evaluation.eval_config}): {name}.min_new_tokens",
                own.min_new_tokens,
            )
        longest, context = longest_response(own, settings), longest_context(own, settings)
        most = longest if context is None else min(longest, context - 1)
        if least > most:
            yield Problem(where, f"{least}, where a response has at most {most} tokens", f"at most {most}")
