"""Putting a run together from settings: every plugin by its name."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.batching import make_batch
from slime_core.build import BuildContext, Rank
from slime_core.claim import take_folder
from slime_core.config.check import check_settings
from slime_core.config.chosen import plugin_problems
from slime_core.config.derive import batch_sizes, choices, run_folder, trackers
from slime_core.config.inputs import model_problems
from slime_core.config.model_fit import check_build
from slime_core.config.sections import (
    AlgorithmSection,
    DataSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrainSection,
)
from slime_core.config.settings import Settings
from slime_core.correction import check_importance
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.bind import bind, choose_options
from slime_core.plugins.registry import Registry
from slime_core.progress import ON_TERMINAL
from slime_core.protocols import DataSource, ReductionView, TokenView, Trainer, needs_of
from slime_core.rewards.keys import check_reward_keys
from slime_core.rewards.overlong import overlong_penalty
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.driver import failure_of
from slime_core.run import Run
from slime_core.rundir import RunDir
from slime_core.sample import Group
from slime_core.sources.making import make_eval_source, make_source, prompts_of
from slime_core.vocabulary import vocabulary_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def resolve_model(name: str, registry: Registry) -> Path:
    """Return the local folder of a model: the folder itself, or what an installed plugin fetches.

    Raises:
        ConfigError: there is no such folder and no plugin knows the name.
    """
    if os.path.isdir(name):
        return Path(name)
    path: Path | None = registry.hooks.slime_resolve_model(name=name)
    if path is None:
        raise ConfigError(model_problems(name, registry))
    return path


def resolve_function(
    settings: Settings,
    registry: Registry,
    group: str,
    reference: str,
    *,
    where: str,
    explicit: dict[str, Any],
) -> Callable[..., Any]:
    """Return a plugin function with its options bound from its `*_args` table and its distribution's sections."""
    plugin = registry.find(group, reference)
    function = registry.load(plugin)
    options = choose_options(
        function, where=where, explicit=explicit, section=settings.section_of(plugin.distribution)
    )
    return bind(function, options)


async def assemble(
    settings: Settings,
    registry: Registry,
    *,
    create_trainer: Callable[[BuildContext], Trainer] | None = None,
) -> Run:
    """Check the settings and build every part.

    Args:
        settings: of the run.
        registry: the installed plugins.
        create_trainer: builds the trainer in the place of the chosen one's factory, for a launcher that has it elsewhere.

    Raises:
        ConfigError: carries every problem that can be known before anything starts.
        SlimeError: a part cannot be built, or the checkpoint does not fit.
    """
    problems = check_settings(settings, registry)
    if problems:
        raise ConfigError(problems)
    run_section = settings.section(RunSection)
    build = make_build(settings, registry)
    if create_trainer is None:
        create_trainer = registry.resolve("slime.trainers", settings.section(TrainSection).train_backend)
    source = make_source(build)
    eval_source = make_eval_source(build)
    num_steps = _num_steps(settings, source)
    await check_reward_keys(settings, functools.partial(make_scorer, settings, registry), prompts_of(source))
    scorer = make_scorer(settings, registry)
    functions = resolve_functions(settings, registry)
    run_dir = RunDir(build.run_dir)
    run = Run(
        settings=settings,
        registry=registry,
        run_dir=run_dir,
        tokenizer=build.tokenizer,
        source=source,
        eval_source=eval_source,
        eval_start=eval_source.state() if eval_source is not None else {},
        buffer=registry.resolve("slime.buffers", settings.section(DataSection).buffer)(build),
        engine=registry.resolve("slime.engines", settings.section(RolloutSection).rollout_engine)(build),
        trainer=create_trainer(build),
        scorer=scorer,
        trackers=[registry.resolve("slime.trackers", name)(build) for name in trackers(run_section)],
        sizes=batch_sizes(settings),
        num_steps=num_steps,
        vocab_size=vocabulary_size(build.model_path, build.tokenizer),
        **functions,
    )
    # Last, when all that can refuse before a start has agreed: nothing is half-written, and nothing deleted in vain.
    take_folder(run_dir, settings, model=build.model_path)
    return run


def make_build(settings: Settings, registry: Registry, *, rank: Rank | None = None) -> BuildContext:
    """Resolve model and tokenizer, and return what the factories build from.

    Raises:
        ConfigError: carries every problem between settings, model and chosen plugins.
    """
    model = settings.section(ModelSection)
    logger.info("importing %s", ", ".join(_long_imports(settings)), extra=ON_TERMINAL)
    if problems := list(plugin_problems(settings, registry)):
        raise ConfigError(problems)
    path = resolve_model(model.hf_checkpoint, registry)
    logger.info("reading the tokenizer of %s", path, extra=ON_TERMINAL)
    build = BuildContext(
        settings=settings,
        registry=registry,
        tokenizer=registry.resolve("slime.tokenizers", model.tokenizer)(path),
        model_path=path,
        run_dir=run_folder(settings),
        rank=rank or Rank(),
    )
    problems = check_build(build)
    if problems:
        raise ConfigError(problems)
    return build


def _long_imports(settings: Settings) -> list[str]:
    """Return what takes long to import, as a line of progress names it."""
    trainer, engine = (
        settings.section(TrainSection).train_backend,
        settings.section(RolloutSection).rollout_engine,
    )
    return [f"the trainer {trainer}", f"the engine {engine}"]


def make_scorer(settings: Settings, registry: Registry) -> Scorer | None:
    """Return what scores samples with the chosen rewards; None when none is chosen."""
    section, picked = settings.section(RewardSection), choices(settings)
    if not picked.rewards:
        return None
    return Scorer(
        picked.rewards,
        pool_of=functools.partial(reward_pool, settings, registry),
        forced=section.custom_rm_path is not None,
    )


def reward_pool(settings: Settings, registry: Registry, reference: str) -> RewardPool:
    """Return the pool of one reward: options from `rm_args`, `rm_args_of` and its section; `run_dir` is the run's folder.

    Raises:
        PluginError: it is not installed, does not import, or does not take its options.
    """
    section, picked = settings.section(RewardSection), choices(settings)
    plugin = registry.find(picked.reward_group, reference)
    main = not section.rm_weights and reference in picked.rewards
    options = choose_options(
        registry.load(plugin),
        where="reward.rm_args" if main else f"reward.rm_args_of.{reference}",
        explicit=(section.rm_args if main else {}) | section.rm_args_of.get(reference, {}),
        section={"run_dir": str(run_folder(settings))} | settings.section_of(plugin.distribution),
    )
    return RewardPool(
        plugin.value,
        options,
        workers=section.reward_workers,
        timeout_s=section.reward_timeout_s,
        memory_bytes=None if section.reward_memory_gb is None else int(section.reward_memory_gb * 1e9),
    )


@dataclass(frozen=True)
class Algorithm:
    """What a trainer computes with, options bound."""

    estimator: Callable[..., tuple[Any, ...]]
    """View -> (advantages, returns), and perhaps metrics and a state; see `protocols.AdvantageEstimator`."""
    loss: Callable[[TokenView, Any], tuple[Any, Mapping[str, Any]]]
    """(View, advantages) -> (loss, metrics); see `protocols.LossFn`."""
    needs: frozenset[str]
    """Optional fields of `TokenView` that the two read."""
    reward_transform: str
    """Reward transform that the estimator wants, or `raw`."""
    value_loss: Callable[[TokenView, Any], tuple[Any, Mapping[str, Any]]] | None = None
    """(View, returns) -> (loss, metrics): the critic's loss; None where nothing reads values."""
    reward_parts: tuple[str, ...] = ()
    """Parts of rewards that the estimator reads."""
    reducer: Callable[[ReductionView], NDArray[np.float64]] | None = None
    """What gave the batch's tokens their weights; for trainers whose estimators reject tokens that then do not count."""


def algorithm(settings: Settings, registry: Registry) -> Algorithm:
    """Return the chosen estimator and loss; every trainer calls this.

    Raises:
        PluginError: one does not import, is not callable, or does not take its options.
    """
    section, picked = settings.section(AlgorithmSection), choices(settings)
    resolve = functools.partial(resolve_function, settings, registry)
    estimator: Any = resolve(
        "slime.advantages",
        picked.advantage,
        where="algorithm.advantage_args",
        explicit=section.advantage_args,
    )
    goes_with_it: str = getattr(estimator, "loss", "policy_loss")
    loss = resolve(
        "slime.losses",
        picked.loss or goes_with_it,
        where="algorithm.loss_args",
        explicit=section.loss_args,
    )
    check_importance(estimator, loss)
    needs = [needs_of(function, getattr(function, "keywords", {})) for function in (estimator, loss)]
    if not hasattr(estimator, "reward_transform"):
        raise PluginError(
            f"slime.advantages: {picked.advantage!r} does not say which rewards it wants; set its attribute "
            "`reward_transform` to the name of a reward transform, such as 'group-norm' or 'raw'"
        )
    wanted = frozenset().union(*needs)
    value_loss = None
    if "values" in wanted:
        value_loss = resolve(
            "slime.losses",
            section.value_loss_type or "value_loss",
            where="algorithm.value_loss_args",
            explicit=section.value_loss_args,
        )
    transform = "raw" if section.disable_rewards_normalization else estimator.reward_transform
    parts = getattr(estimator, "reward_parts", lambda options: ())(getattr(estimator, "keywords", {}))
    reducer = resolve(
        "slime.reducers", picked.reducer, where="algorithm.reducer_args", explicit=section.reducer_args
    )
    return Algorithm(estimator, loss, wanted, transform, value_loss, tuple(parts), reducer)


def resolve_functions(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Return the chosen functions, options bound, by the field of `Run` that each is; raises as `algorithm` does."""
    section, rollout = settings.section(AlgorithmSection), settings.section(RolloutSection)
    chosen = algorithm(settings, registry)
    assert chosen.reducer is not None
    resolve = functools.partial(resolve_function, settings, registry)
    transform = resolve(
        "slime.reward_transforms",
        settings.section(RewardSection).custom_reward_post_process_path or chosen.reward_transform,
        where="algorithm.reward_transform_args",
        explicit=section.reward_transform_args,
    )
    return {
        "rollout_fn": registry.resolve("slime.rollouts", rollout.rollout_function_path),
        "generate": registry.resolve("slime.generators", rollout.custom_generate_function_path),
        "drop_reason": _drop_reason(settings, registry),
        "make_batch": functools.partial(
            make_batch,
            global_batch_size=batch_sizes(settings).global_batch_size,
            temperature=rollout.rollout_temperature,
            transform=transform,
            reducer=chosen.reducer,
            reward_key=settings.section(RewardSection).reward_key,
            reward_parts=chosen.reward_parts,
            shaping=_shaping(settings),
        ),
    }


def _shaping(settings: Settings) -> Callable[[NDArray[np.int64]], NDArray[np.float64]] | None:
    """Return what lengths add to rewards; None where nothing does."""
    reward = settings.section(RewardSection)
    if reward.overlong_buffer_len is None:
        return None
    return functools.partial(
        overlong_penalty,
        max_response_len=settings.section(RolloutSection).rollout_max_response_len,
        overlong_buffer_len=reward.overlong_buffer_len,
        overlong_penalty_factor=reward.overlong_penalty_factor,
    )


def _drop_reason(settings: Settings, registry: Registry) -> Callable[[Group], str | None]:
    rollout = settings.section(RolloutSection)
    path = rollout.dynamic_sampling_filter_path
    if path is None:
        return failure_of
    explicit = dict(rollout.filter_args)
    key = settings.section(RewardSection).reward_key
    function = registry.resolve("slime.filters", path)
    if key is not None and "reward_key" in inspect.signature(function).parameters:
        explicit.setdefault("reward_key", key)
    keep = resolve_function(
        settings, registry, "slime.filters", path, where="rollout.filter_args", explicit=explicit
    )
    return lambda group: failure_of(group) or keep(group)


def _num_steps(settings: Settings, source: DataSource) -> int:
    run = settings.section(RunSection)
    if run.num_rollout is not None:
        return run.num_rollout
    size = settings.section(RolloutSection).rollout_batch_size
    steps = (run.num_epoch or 1) * len(source) // size
    if steps < 1:
        raise ConfigError(
            [
                Problem(
                    "run.num_epoch",
                    f"{run.num_epoch} of {len(source)} prompts",
                    f"at least one step of {size} prompts",
                )
            ]
        )
    return steps
