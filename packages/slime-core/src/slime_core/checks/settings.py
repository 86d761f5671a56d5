"""Checks across settings. They return problems and change nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from slime_core.checks.chosen_plugins import ROLLOUT_HOOKS, name_problems
from slime_core.checks.input_files import missing_files
from slime_core.checks.loops import loop_problems
from slime_core.checks.prompts import evaluation_problems, least_lengths, prompt_problems
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.base import Unset
from slime_core.config.derive import batch_sizes, choices, is_local, is_single_turn, sends_images
from slime_core.config.eval_sets import eval_sets
from slime_core.config.factories import trainer_factory
from slime_core.config.settings import Settings
from slime_core.config.stages import STAGE, Stage
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry
from slime_core.protocols import IMAGE
from slime_core.rollout.rollouts.sft import misfits, sft
from slime_core.rundir.claim import folder_problems
from slime_core.runtime.processes.ports import is_local_address
from slime_core.weights.sync import wanted_transport

#: The loop that trains nothing.
_WITHOUT_TRAINER = "slime-core/rollout-only"


def check_settings(settings: Settings, registry: Registry) -> list[Problem]:
    """Return everything that is wrong and can be known without starting anything, and without what takes long to import.

    Settings without a value (see `config.load.read_runs`) keep no check from telling what it knows without them.
    """
    problems: list[Problem] = []
    for check in _CHECKS:
        problems += _told(partial(check, settings))
    for look in _CHECKS_OF_CHOICES:
        problems += _told(partial(look, settings, registry))
    for hook in registry.hook_manager.hook.slime_check_config.get_hookimpls():
        known = {"settings": settings, "registry": registry}
        given = {name: known[name] for name in hook.argnames}
        answer: Callable[..., Any] = hook.function
        problems += _told(partial(answer, **given))
    return problems


def _told(check: Callable[[], Iterable[Problem] | None]) -> list[Problem]:
    """Return the problems that a check yields before it reads a setting that has no value (`Unset`)."""
    problems: list[Problem] = []
    try:
        for problem in check() or ():
            problems.append(problem)
    except ConfigError as error:
        problems += error.problems
    except Unset:
        pass
    return problems


def check_stages(
    stages: Sequence[Stage], registry: Registry, *, to_train: bool = False, is_translated: bool = False
) -> list[Problem]:
    """Return everything that is wrong with the runs of a recipe and can be known without starting anything.

    Args:
        stages: as they were read.
        registry: the installed plugins.
        to_train: whether they are to be trained, which takes a trainer.
        is_translated: whether the flags were written for another program, which may have taken some that did nothing.
    """
    owners: dict[Problem, list[str]] = {}
    for stage in stages:
        problems = check_settings(stage.beforehand, registry)
        if to_train:
            problems += _told(partial(_trainer, stage.beforehand, registry))
        for problem in dict.fromkeys(problems):
            owners.setdefault(problem, []).append(stage.name)
    problems = [
        problem if len(names) == len(stages) else _of_stage(", ".join(names), problem)
        for problem, names in owners.items()
    ]
    if not is_translated:
        problems += _told(partial(unread_flags, [stage.beforehand for stage in stages], registry))
    return [*problems, *_told(partial(_between_stages, stages))]


def _learns(settings: Settings, registry: Registry) -> bool:
    try:
        return trainer_factory(settings.train, registry).capabilities.learns
    except PluginError:  # which is said already
        return True


def _trainer(settings: Settings, registry: Registry) -> Iterator[Problem]:
    learns, only_rolls_out = _learns(settings, registry), means(settings.run.loop, _WITHOUT_TRAINER)
    if not learns and not only_rolls_out:
        yield Problem(
            "train.train_backend", "none", "a trainer", "slime eval does without one, and --loop rollout-only"
        )
    if learns and only_rolls_out:
        yield Problem(
            "run.loop", f"{settings.run.loop} with a trainer", "--train-backend none: it would train nothing"
        )
    elif only_rolls_out:
        section = settings.checkpoint
        if section.save_last:
            yield Problem("checkpoint.save_last", "true where nothing is trained", "false: --no-save-last")
        for name in ("save_interval", "save_hf"):
            if (value := getattr(section, name)) is not None:
                yield Problem(f"checkpoint.{name}", f"{value} where nothing is trained", "none")


def _between_stages(stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield settings that only the first stage may have, and those in which no two stages may agree."""
    writers: dict[str, str] = {}
    for stage in stages:
        if stage is not stages[0]:
            for where, value in _starts(stage.settings):
                wanted, todo = (
                    "nothing: it starts from the weights of the stage before",
                    "set it for the first",
                )
                todo += f", as {STAGE}.{stages[0].name}.{where}"
                yield _of_stage(stage.name, Problem(where, repr(value), wanted, todo))
        section = stage.settings.checkpoint
        if section.save_hf is not None:
            other = writers.setdefault(section.save_hf, stage.name)
            if other != stage.name:
                where = "checkpoint.save_hf"
                found = f"{section.save_hf!r}, which stage {other} writes too"
                yield _of_stage(stage.name, Problem(where, found, "a folder of its own"))


def _starts(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield (setting, value) of all that name what a run starts from."""
    for table, section in settings.sections.items():
        for field in section.of_first_stage:
            if (value := getattr(section, field)) is not None:
                yield f"{table}.{field}", value


def _of_stage(name: str, problem: Problem) -> Problem:
    return replace(problem, where=f"{STAGE} {name}: {problem.where}")


def _supervised(settings: Settings, registry: Registry) -> Iterator[Problem]:
    rollout = settings.rollout
    try:
        chosen = registry.resolve("slime.rollouts", rollout.rollout_function_path)
    except PluginError:  # which is said already
        return
    if chosen is sft:
        yield from misfits(rollout)


def _staleness(settings: Settings) -> Iterator[Problem]:
    interval = settings.train.update_weights_interval
    bound = settings.rollout.max_staleness
    if interval > 1 and (bound is None or bound < interval - 1):
        found = f"{interval}, and rollout.max_staleness {'not given' if bound is None else bound}"
        yield Problem(
            "train.update_weights_interval",
            found,
            f"max_staleness of at least {interval - 1}: so old is the last batch before an update",
        )


def _saving(settings: Settings) -> Iterator[Problem]:
    section = settings.checkpoint
    if section.async_save and section.save_interval is None:
        yield Problem("checkpoint.async_save", "it without save_interval", "checkpoint.save_interval")
    if section.save_hf is None:
        return
    if section.save_interval is None and not section.save_last:
        yield Problem("checkpoint.save_hf", "it where nothing is saved", "checkpoint.save_interval")


#: Transports whose halves meet at an address.
_MET = ("distributed", "distributed-delta", "nccl", "cuda-ipc")


def _weight_folder(settings: Settings) -> Iterator[Problem]:
    section = settings.train
    folder, where = section.update_weight_disk_dir, "train.update_weight_disk_dir"
    if folder is None:
        return
    if wanted_transport(section) in (None, "memory", *_MET):
        yield Problem(where, f"{folder}, with nothing that goes there", "--update-weight-transport disk")
    if os.path.exists(folder) and not os.path.isdir(folder):
        yield Problem(where, f"{folder}, which is a file", "a folder")


def _weight_host(settings: Settings) -> Iterator[Problem]:
    """Refuse an address that is not of this machine or that nobody meets at, and ranks elsewhere that cannot reach it."""
    section, where = settings.train, "train.update_weight_host"
    host, is_met = section.update_weight_host, wanted_transport(section) in _MET
    if host is None:
        return
    if not is_met:
        yield Problem(
            where, f"{host}, with nobody to meet there", "--update-weight-transport distributed or nccl"
        )
    elif not is_local_address(f"{host}:0"):
        yield Problem(where, host, "an IPv4 address of this machine, as `ip -4 address` prints them")
    elif host.startswith("127.") and settings.cluster.actor_num_nodes > 1:
        yield Problem(
            where,
            f"{host}, which ranks on other machines do not reach, and {settings.cluster.actor_num_nodes} nodes",
            "an address of this machine that they reach",
            "or send by disk (--update-weight-transport disk)",
        )


def _lengths(settings: Settings) -> Iterator[Problem]:
    context = settings.rollout.rollout_max_context_len
    prompt = settings.data.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield Problem(
            "data.rollout_max_prompt_len",
            f"{prompt} with rollout.rollout_max_context_len {context}",
            f"at most {context - 1}",
        )


def _response_lengths(settings: Settings) -> Iterator[Problem]:
    """Refuse lengths that no response can have."""
    rollout = settings.rollout
    longest, context = rollout.rollout_max_response_len, rollout.rollout_max_context_len
    if context is not None and context - 1 < longest:
        longest, of = context - 1, f"rollout.rollout_max_context_len {context}, one of it for the prompt"
    else:
        of = f"rollout.rollout_max_response_len {longest}"
    buffer = settings.reward.overlong_buffer_len
    for where, length in (
        ("rollout.rollout_min_new_tokens", rollout.rollout_min_new_tokens),
        ("reward.overlong_buffer_len", buffer),
    ):
        if length is not None and length > longest:
            yield Problem(where, f"{length} with {of}", f"at most {longest}")


def _filter(settings: Settings) -> Iterator[Problem]:
    """Refuse options of a filter where there is none."""
    section = settings.rollout
    if section.filter_args and section.dynamic_sampling_filter_path is None:
        yield Problem(
            "rollout.filter_args",
            f"{section.filter_args} and no filter",
            "rollout.dynamic_sampling_filter_path",
            "give --dynamic-sampling-filter-path, or drop --filter-args",
        )


def _hook_args(settings: Settings) -> Iterator[Problem]:
    """Refuse options of functions that are not chosen."""
    section = settings.rollout
    chosen = {getattr(section, field) for field in ROLLOUT_HOOKS if field != "rollout_sample_hook_path"}
    chosen.update(section.rollout_sample_hook_path)
    for name in section.hook_args:
        if name not in chosen:
            there = ", ".join(sorted(filter(None, chosen))) or "none is chosen"
            yield Problem(
                "rollout.hook_args", repr(name), f"the name of a function that takes options: {there}"
            )


def _processes(settings: Settings) -> Iterator[Problem]:
    if not is_local(settings.run):
        return
    section = settings.cluster
    if section.num_gpus_per_node is not None:
        found = f"{section.num_gpus_per_node} with launcher local"
        yield Problem(
            "cluster.num_gpus_per_node", found, "nothing: it reserves no machine", "give --launcher ray"
        )
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        number = getattr(section, name)
        if number > 1:
            yield Problem(
                f"cluster.{name}", str(number), "1: launcher local is one process", "give --launcher ray"
            )
    for name in (f"{role}_num_{which}" for role in section.pools for which in ("nodes", "gpus_per_node")):
        if (given := getattr(section, name)) is not None:
            wanted = "nothing: it has one process, with all roles"
            yield Problem(f"cluster.{name}", f"{given} with launcher local", wanted, "give --launcher ray")
    if section.train_env_vars:
        yield Problem(
            "cluster.train_env_vars",
            f"{', '.join(section.train_env_vars)} with launcher local",
            "nothing: it starts no process of the trainer",
            "set them in the shell",
        )


def _media(settings: Settings, registry: Registry) -> Iterator[Problem]:
    data, where = settings.data, "data.multimodal_keys"
    if data.multimodal_keys and _learns(settings, registry):
        backend = settings.train.train_backend
        yield Problem(
            where,
            f"{sorted(data.multimodal_keys)} with the trainer {backend!r}",
            "--train-backend none and `slime eval`",
            "batches are token ids, and no trainer here learns from what a model saw",
        )
    if not sends_images(settings):
        return
    if others := sorted(set(data.multimodal_keys or ()) - {IMAGE}):
        yield Problem(
            where, f"{others}", IMAGE, "single-turn sends nothing else; a generator of your own may"
        )
    if not data.apply_chat_template:
        yield Problem(
            "data.apply_chat_template",
            "false with multimodal_keys",
            "true",
            "the model's chat template says how a prompt with an image is written",
        )


def _steps(settings: Settings) -> Iterator[Problem]:
    run = settings.run
    if run.num_rollout is None and run.num_epoch is None:
        yield Problem(
            "run.num_rollout", "nothing", "the number of steps", "give --num-rollout or --num-epoch"
        )


def _reward(settings: Settings) -> Iterator[Problem]:
    reward = settings.reward
    own = not is_single_turn(settings)  # such a generator, or its environment, may give rewards itself
    scored = reward.rm_type or reward.custom_rm_path or reward.rm_weights or own
    if settings.algorithm.loss_type != "sft_loss" and not scored:
        yield Problem(
            "reward.rm_type", "nothing", "a reward", "give --rm-type, --custom-rm-path or --rm-weights"
        )


def _environment(settings: Settings, registry: Registry) -> Iterator[Problem]:
    chosen = settings.environment.environment
    if chosen is None or not is_single_turn(settings):
        return
    if not any(one.custom_generate_function_path for one in eval_sets(settings, registry).values()):
        yield Problem(
            "environment.environment",
            repr(chosen),
            "a generator that asks it",
            "give --custom-generate-function-path multi-turn",
        )


def _batch_sizes(settings: Settings) -> Iterator[Problem]:
    batch_sizes(settings)
    return iter(())


def _one_choice(settings: Settings) -> Iterator[Problem]:
    choices(settings)
    return iter(())


#: What each looks at is its own matter; a setting without a value silences those that ask for it.
_CHECKS: tuple[Callable[[Settings], Iterator[Problem]], ...] = (
    _batch_sizes,
    _one_choice,
    folder_problems,
    _lengths,
    _response_lengths,
    _filter,
    _hook_args,
    _saving,
    _staleness,
    _weight_folder,
    _weight_host,
    _steps,
    evaluation_problems,
    _reward,
    _processes,
)
#: Those that look at what is chosen by name.
_CHECKS_OF_CHOICES: tuple[Callable[[Settings, Registry], Iterator[Problem]], ...] = (
    name_problems,
    prompt_problems,
    missing_files,
    least_lengths,
    loop_problems,
    _supervised,
    _media,
    _environment,
)
