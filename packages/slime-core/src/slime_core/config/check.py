"""Checks across settings. They return problems and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slime_core.build import BuildContext
from slime_core.claim import folder_problems
from slime_core.config.derive import batch_sizes, choices, num_ranks, sends_images, trackers
from slime_core.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvalSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrainSection,
)
from slime_core.config.settings import Settings
from slime_core.config.stages import STAGE, Stage
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.images import IMAGE
from slime_core.no_trainer import NAMES as NO_TRAINER
from slime_core.plugins.registry import Registry
from slime_core.rollout.sft import misfits
from slime_core.weights import wanted_transport


def check_settings(settings: Settings, registry: Registry) -> list[Problem]:
    """Return everything that is wrong and can be known without starting anything."""
    problems: list[Problem] = []
    for check in (batch_sizes, choices):
        problems += _caught(partial(check, settings))
    problems += folder_problems(settings)
    problems += _lengths(settings)
    problems += _filter(settings)
    problems += _saving(settings)
    problems += _weight_folder(settings)
    problems += _required(settings)
    problems += _processes(settings)
    problems += _media(settings)
    if not problems:
        problems += _names(settings, registry)
    if not problems:
        problems += _supervised(settings, registry)
    for answer in registry.hooks.slime_check_config(settings=settings):
        problems += answer
    return problems


def check_stages(stages: Sequence[Stage], registry: Registry) -> list[Problem]:
    """Return everything that is wrong with the runs of a recipe and can be known without starting anything."""
    owners: dict[Problem, list[str]] = {}
    for stage in stages:
        for problem in check_settings(stage.beforehand, registry):
            owners.setdefault(problem, []).append(stage.name)
    problems = [
        problem if len(names) == len(stages) else _of_stage(", ".join(names), problem)
        for problem, names in owners.items()
    ]
    return [*problems, *_between_stages(stages)]


def check_build(build: BuildContext) -> list[Problem]:
    """Return what is wrong between settings, model and chosen plugins; imports the plugins, and builds nothing."""
    problems: list[Problem] = []
    backend, n = build.section(TrainSection).train_backend, num_ranks(build.settings)
    factory = build.registry.resolve("slime.trainers", backend)
    if n > 1 and not getattr(factory, "ranked", False):
        problems.append(
            Problem(
                "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node",
                f"{n} with the trainer {backend!r}",
                "1: this trainer is one process",
            )
        )
    if build.section(CheckpointSection).async_save and not getattr(factory, "saves_in_background", False):
        problems.append(
            Problem(
                "checkpoint.async_save",
                f"it with the trainer {backend!r}",
                "a trainer that trains on while it writes",
                "drop --async-save",
            )
        )
    problems += _engine_needs(build)
    problems += _images(build)
    for answer in build.registry.hooks.slime_check_build(build=build):
        problems += answer
    return problems


def _engine_needs(build: BuildContext) -> Iterator[Problem]:
    needs = build.engine_needs
    if not needs:
        return
    engine = build.section(RolloutSection).rollout_engine
    factory = build.registry.resolve("slime.engines", engine)
    offers: frozenset[str] = getattr(factory, "offers", frozenset())
    if missing := sorted(needs - offers):
        yield Problem(
            "rollout.rollout_engine",
            f"{engine}, whose completions have no {', '.join(missing)}",
            "an engine that offers what the run needs",
            "the trainer's settings ask for it",
        )


def _images(build: BuildContext) -> Iterator[Problem]:
    """Refuse an engine that takes no images, where they are to go to it."""
    rollout = build.section(RolloutSection)
    if not sends_images(build.settings):
        return
    factory = build.registry.resolve("slime.engines", rollout.rollout_engine)
    if not getattr(factory, "sees_images", False):
        yield Problem(
            "rollout.rollout_engine",
            f"{rollout.rollout_engine}, which takes no images, with data.multimodal_keys",
            "an engine that does",
            "--rollout-engine sglang does",
        )


def chosen(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, group, reference) for everything that is chosen by name."""
    run, model = settings.section(RunSection), settings.section(ModelSection)
    data, rollout = settings.section(DataSection), settings.section(RolloutSection)
    evaluation, picked = settings.section(EvalSection), choices(settings)
    reward = settings.section(RewardSection)
    yield "run.loop", "slime.loops", run.loop
    yield "run.launcher", "slime.launchers", run.launcher
    for tracker in trackers(run):
        yield "run.tracker", "slime.trackers", tracker
    yield "model.tokenizer", "slime.tokenizers", model.tokenizer
    yield "data.data_source_path", "slime.sources", data.data_source_path
    yield "data.buffer", "slime.buffers", data.buffer
    yield "rollout.rollout_engine", "slime.engines", rollout.rollout_engine
    yield "rollout.rollout_function_path", "slime.rollouts", rollout.rollout_function_path
    yield "data.loss_mask_type", "slime.loss_masks", data.loss_mask_type
    yield "rollout.custom_generate_function_path", "slime.generators", rollout.custom_generate_function_path
    if rollout.dynamic_sampling_filter_path is not None:
        yield "rollout.dynamic_sampling_filter_path", "slime.filters", rollout.dynamic_sampling_filter_path
    for reference in picked.rewards:
        yield "reward.rm_weights" if reward.rm_weights else "reward.rm_type", picked.reward_group, reference
    for reference in reward.rm_args_of:
        yield "reward.rm_args_of", picked.reward_group, reference
    if reward.custom_reward_post_process_path is not None:
        where = "reward.custom_reward_post_process_path"
        yield where, "slime.reward_transforms", reward.custom_reward_post_process_path
    yield "train.train_backend", "slime.trainers", settings.section(TrainSection).train_backend
    yield "algorithm.advantage_estimator", "slime.advantages", picked.advantage
    if picked.loss is not None:
        yield "algorithm.loss_type", "slime.losses", picked.loss
    value_loss = settings.section(AlgorithmSection).value_loss_type
    if value_loss is not None:
        yield "algorithm.value_loss_type", "slime.losses", value_loss
    yield "algorithm.loss_reducer", "slime.reducers", picked.reducer
    if evaluation.eval_data_source_path is not None:
        yield "eval.eval_data_source_path", "slime.sources", evaluation.eval_data_source_path


def _between_stages(stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield what no stage but the first may have, and what no two may share."""
    writers: dict[str, str] = {}
    for stage in stages:
        section = stage.settings.section(CheckpointSection)
        if section.load is not None and stage is not stages[0]:
            wanted, todo = "nothing: it starts from the weights of the stage before", "set it for the first"
            todo += f", as {STAGE}.{stages[0].name}.checkpoint.load"
            yield _of_stage(stage.name, Problem("checkpoint.load", repr(section.load), wanted, todo))
        if section.save_hf is not None:
            other = writers.setdefault(section.save_hf, stage.name)
            if other != stage.name:
                where = "checkpoint.save_hf"
                found = f"{section.save_hf!r}, which stage {other} writes too"
                yield _of_stage(stage.name, Problem(where, found, "a folder of its own"))


def _of_stage(name: str, problem: Problem) -> Problem:
    return replace(problem, where=f"{STAGE} {name}: {problem.where}")


def _names(settings: Settings, registry: Registry) -> Iterator[Problem]:
    broken = registry.broken_hooks
    for setting, group, reference in chosen(settings):
        try:
            plugin = registry.find(group, reference)
        except PluginError as error:
            table, _, field = setting.partition(".")
            yield Problem(f"{setting} ({settings.origin(table, field)})", repr(reference), str(error))
            continue
        if plugin.distribution in broken:
            yield Problem(
                setting,
                f"{reference!r} of {plugin.distribution}",
                "a plugin that imports",
                broken[plugin.distribution],
            )


def _supervised(settings: Settings, registry: Registry) -> Iterator[Problem]:
    rollout = settings.section(RolloutSection)
    if registry.find("slime.rollouts", rollout.rollout_function_path).value == "slime_core.rollout.sft:sft":
        yield from misfits(rollout)


def _saving(settings: Settings) -> Iterator[Problem]:
    section = settings.section(CheckpointSection)
    if section.async_save and section.save_interval is None:
        yield Problem("checkpoint.async_save", "it without save_interval", "checkpoint.save_interval")
    if section.save_hf is None:
        return
    if section.save_interval is None and not section.save_last:
        yield Problem("checkpoint.save_hf", "it where nothing is saved", "checkpoint.save_interval")


def _weight_folder(settings: Settings) -> Iterator[Problem]:
    section = settings.section(TrainSection)
    folder, where = section.update_weight_disk_dir, "train.update_weight_disk_dir"
    if folder is None:
        return
    if wanted_transport(section) not in ("disk", "disk-delta"):
        yield Problem(where, f"{folder}, with nothing that goes there", "--update-weight-transport disk")
    if Path(folder).exists() and not Path(folder).is_dir():
        yield Problem(where, f"{folder}, which is a file", "a folder")


def _lengths(settings: Settings) -> Iterator[Problem]:
    rollout, data = settings.section(RolloutSection), settings.section(DataSection)
    context, prompt = rollout.rollout_max_context_len, data.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield Problem(
            "data.rollout_max_prompt_len",
            f"{prompt} with rollout.rollout_max_context_len {context}",
            f"at most {context - 1}",
        )


def _filter(settings: Settings) -> Iterator[Problem]:
    """Refuse options of a filter where there is none."""
    section = settings.section(RolloutSection)
    if section.filter_args and section.dynamic_sampling_filter_path is None:
        yield Problem(
            "rollout.filter_args",
            f"{section.filter_args} and no filter",
            "rollout.dynamic_sampling_filter_path",
            "give --dynamic-sampling-filter-path, or drop --filter-args",
        )


def _processes(settings: Settings) -> Iterator[Problem]:
    if settings.section(RunSection).launcher not in ("local", "slime-core/local"):
        return
    section = settings.section(ClusterSection)
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        number = getattr(section, name)
        if number > 1:
            yield Problem(
                f"cluster.{name}", str(number), "1: launcher local is one process", "give --launcher ray"
            )
    if section.train_env_vars:
        yield Problem(
            "cluster.train_env_vars",
            f"{', '.join(section.train_env_vars)} with launcher local",
            "nothing: it starts no process of the trainer",
            "set them in the shell",
        )


def _media(settings: Settings) -> Iterator[Problem]:
    data, where = settings.section(DataSection), "data.multimodal_keys"
    if data.multimodal_keys and (backend := settings.section(TrainSection).train_backend) not in NO_TRAINER:
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


def _required(settings: Settings) -> Iterator[Problem]:
    run, data, evaluation = (
        settings.section(RunSection),
        settings.section(DataSection),
        settings.section(EvalSection),
    )
    if run.num_rollout is None and run.num_epoch is None:
        yield Problem(
            "run.num_rollout", "nothing", "the number of steps", "give --num-rollout or --num-epoch"
        )
    if data.data_source_path == "file" and data.prompt_data is None:
        yield Problem(
            "data.prompt_data",
            "nothing",
            "a JSONL or Parquet file",
            "give --prompt-data, or another --data-source-path",
        )
    if (
        evaluation.eval_interval is not None
        and not evaluation.eval_prompt_data
        and evaluation.eval_data_source_path is None
    ):
        yield Problem(
            "eval.eval_interval", "no evaluation set", "eval.eval_prompt_data or eval.eval_data_source_path"
        )
    if len(evaluation.eval_prompt_data) % 2:
        yield Problem(
            "eval.eval_prompt_data", f"{len(evaluation.eval_prompt_data)} words", "name path [name path ...]"
        )
    reward = settings.section(RewardSection)
    if settings.section(AlgorithmSection).loss_type != "sft_loss" and not (
        reward.rm_type or reward.custom_rm_path or reward.rm_weights
    ):
        yield Problem(
            "reward.rm_type", "nothing", "a reward", "give --rm-type, --custom-rm-path or --rm-weights"
        )


def _caught(function: Callable[[], object]) -> Iterable[Problem]:
    try:
        function()
    except ConfigError as error:
        return error.problems
    return ()
