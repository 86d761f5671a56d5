"""Putting a run together from settings: every plugin by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.checks.settings import check_settings
from slime_core.config.build import BuildContext
from slime_core.config.derive import batch_sizes, choices, run_folder, trackers
from slime_core.config.factories import engine_factory
from slime_core.config.functions import refuse_options, resolve_function, run_args
from slime_core.config.model_fit import context_limit
from slime_core.config.settings import Settings
from slime_core.config.user_factories import made, naming
from slime_core.data.conversion import converted
from slime_core.data.make_batch import make_batch
from slime_core.data.make_source import prompts_of
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.files.json_text import shown
from slime_core.plugins.bind import choose_options, options_of, parameters_of
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry
from slime_core.protocols import DataSource, EvalFn, Place, ReductionView, TokenView, Trainer, needs_of
from slime_core.protocols.correction import check_importance, with_correction
from slime_core.rewards.overlong import overlong_penalty
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.reward_keys import check_reward_keys
from slime_core.rewards.scorer import Scorer
from slime_core.rewards.workers.supervisor import RewardWorkers
from slime_core.rewards.workers.wire import Setup
from slime_core.rollout.group import failure_of
from slime_core.rollout.user_hooks import resolve_rollout_hooks
from slime_core.run.build import make_build
from slime_core.run.run import Run
from slime_core.run.sources import make_sources
from slime_core.run.vocabulary import vocabulary_size
from slime_core.rundir.claim import take_folder
from slime_core.rundir.events import EventLog
from slime_core.rundir.rundir import RunDir
from slime_core.samples import Group
from slime_core.samples.reused_memory import ReusedMemory
from slime_core.weights.sync import wanted_transport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Placement(Protocol):
    """Where a launcher has the parts of a run that are not in its process."""

    def begin(self, build: BuildContext) -> None:
        """Begin to start what takes long beside what is left to check, and wait for nothing.

        Called first, once everything is checked that needs no plugins but trainer, engine and model. The run's folder is not
        taken yet: nothing may be written there.
        """

    def create_trainer(self, build: BuildContext) -> Trainer:
        """Return the trainer, in the place of what the chosen one's factory builds."""

    def places(self, build: BuildContext) -> Mapping[int, Place]:
        """Return the places of the engine's processes, by the first GPU of each (`EngineFactory.gpus`)."""

    def host(self, build: BuildContext) -> str:
        """Return the address of this machine at which ranks and servers reach it (`BuildContext.host`)."""

    def reward_workers(self, build: BuildContext) -> Callable[[Setup, int], RewardWorkers] | None:
        """Return what makes the workers of each reward, so many on each machine that has some; None for children of this process."""

    async def close(self) -> None:
        """End what is left of all that was begun: whether it became a run or not. May be called before `begin`, and twice."""


async def assemble(settings: Settings, registry: Registry, *, placement: Placement | None = None) -> Run:
    """Check the settings and build every part.

    Args:
        settings: of the run.
        registry: the installed plugins.
        placement: where trainer and engine are; None has all in this process and on this machine. Whoever gives one closes it,
            also when this raises.

    Raises:
        ConfigError: carries every problem that can be known before anything starts.
        SlimeError: a part cannot be built, or the checkpoint does not fit.
    """
    problems = check_settings(settings, registry)
    if problems:
        raise ConfigError(problems)
    run_section = settings.run
    build = make_build(settings, registry, begin=None if placement is None else placement.begin)
    create_trainer = registry.resolve("slime.trainers", settings.train.train_backend)
    if placement is not None:
        build = replace(build, places=placement.places(build), host=placement.host(build))
        create_trainer = placement.create_trainer
    engine_of = engine_factory(settings.rollout, registry)
    source, eval_source = make_sources(build)
    num_steps = _num_steps(settings, source)
    await check_reward_keys(settings, functools.partial(make_scorer, settings, registry), prompts_of(source))
    workers_of = None if placement is None else placement.reward_workers(build)
    scorer = make_scorer(settings, registry, workers_of=workers_of)
    functions = resolve_functions(settings, registry)
    run_dir = RunDir(build.run_dir)
    rollout, train = settings.rollout, settings.train
    with naming(registry, "slime.engines", rollout.rollout_engine, where="rollout.rollout_engine"):
        engine = engine_of(build)
    with naming(registry, "slime.trainers", train.train_backend, where="train.train_backend"):
        trainer = create_trainer(build)
    run = Run(
        settings=settings,
        registry=registry,
        run_dir=run_dir,
        tokenizer=build.tokenizer,
        source=source,
        eval_source=eval_source,
        eval_start=eval_source.state() if eval_source is not None else {},
        buffer=made(build, "slime.buffers", settings.data.buffer, where="data.buffer"),
        engine=engine,
        transport=wanted_transport(settings.train) or engine_of.transport(build),
        trainer=trainer,
        scorer=scorer,
        trackers=[made(build, "slime.trackers", name, where="run.tracker") for name in trackers(run_section)],
        sizes=batch_sizes(settings),
        num_steps=num_steps,
        events=EventLog(run_dir.events if run_section.events else None),
        vocab_size=vocabulary_size(build.model_path, build.tokenizer),
        engine_context_len=context_limit(build),
        **functions,
    )
    # Last, when all that can refuse before a start has agreed: nothing is half-written, and nothing deleted in vain.
    take_folder(run_dir, settings, model=build.model_path)
    return run


def make_scorer(
    settings: Settings,
    registry: Registry,
    *,
    workers_of: Callable[[Setup, int], RewardWorkers] | None = None,
) -> Scorer:
    """Return the `Scorer` of the chosen rewards, if any, and of those that samples choose; with workers where a launcher has them."""
    section, picked = settings.reward, choices(settings)
    return Scorer(
        picked.rewards,
        pool_of=functools.partial(reward_pool, settings, registry, workers_of=workers_of),
        forced=section.custom_rm_path is not None,
    )


def reward_pool(
    settings: Settings,
    registry: Registry,
    reference: str,
    *,
    workers_of: Callable[[Setup, int], RewardWorkers] | None = None,
) -> RewardPool:
    """Return the pool of one reward: options from `rm_args`, `rm_args_of` and its section; `run_dir` is the run's folder.

    Raises:
        PluginError: it is not installed, does not import, or does not take its options.
    """
    section, picked = settings.reward, choices(settings)
    plugin = registry.find(picked.reward_group, reference)
    main = not section.rm_weights and reference in picked.rewards
    explicit = (section.rm_args if main else {}) | section.rm_args_of.get(reference, {})
    where = "reward.rm_args" if main else f"reward.rm_args_of.{reference}"
    adapter, options = registry.adapter(plugin), dict[str, Any]()
    if adapter is not None:
        refuse_options(reference, explicit, where=where)
        options = {**adapter.options, "run_args": run_args(settings)}
        adapter.build(options["run_args"])  # which workers do again; here it is told before anything starts
    else:
        given = {"run_dir": str(run_folder(settings))} | settings.section_of(plugin.distribution)
        options = choose_options(registry.load(plugin), where=where, explicit=explicit, section=given)
    return RewardPool(
        plugin.value if adapter is None else adapter.reference,
        options,
        workers=section.reward_workers,
        timeout_s=section.reward_timeout_s,
        memory_bytes=None if section.reward_memory_gb is None else int(section.reward_memory_gb * 1e9),
        workers_of=workers_of,
    )


@dataclass(frozen=True)
class Algorithm:
    """Advantage estimator and loss of a trainer, with their options bound."""

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
    section, picked = settings.algorithm, choices(settings)
    resolve = functools.partial(resolve_function, settings, registry)
    own = registry.resolve("slime.advantages", picked.advantage)
    replaced = section.custom_tis_function_path is not None and "use_tis" in options_of(own)
    estimator: Any = resolve(
        "slime.advantages",
        picked.advantage,
        where="algorithm.advantage_args",
        explicit=section.advantage_args | ({"use_tis": False} if replaced else {}),
    )
    goes_with_it: str = getattr(estimator, "loss", "policy_loss")
    loss = resolve(
        "slime.losses",
        picked.loss or goes_with_it,
        where="algorithm.loss_args",
        explicit=section.loss_args,
    )
    if section.custom_tis_function_path is not None:
        correct = resolve(
            "slime.corrections",
            section.custom_tis_function_path,
            where="algorithm.tis_args",
            explicit=section.tis_args,
        )
        estimator = with_correction(estimator, correct, name=section.custom_tis_function_path)
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
        own_needs = needs_of(value_loss, getattr(value_loss, "keywords", {}))
        wanted |= own_needs - {"new_values"}  # which the critic itself fills
    transform = "raw" if section.disable_rewards_normalization else estimator.reward_transform
    parts = getattr(estimator, "reward_parts", lambda options: ())(getattr(estimator, "keywords", {}))
    reducer = resolve(
        "slime.reducers", picked.reducer, where="algorithm.reducer_args", explicit=section.reducer_args
    )
    return Algorithm(estimator, loss, wanted, transform, value_loss, tuple(parts), reducer)


def resolve_functions(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Return the chosen functions, options bound, by the field of `Run` that each is; raises as `algorithm` does."""
    section, rollout = settings.algorithm, settings.rollout
    chosen = algorithm(settings, registry)
    assert chosen.reducer is not None
    resolve = functools.partial(resolve_function, settings, registry)
    transform = resolve(
        "slime.reward_transforms",
        settings.reward.custom_reward_post_process_path or chosen.reward_transform,
        where="algorithm.reward_transform_args",
        explicit=section.reward_transform_args,
    )
    hooks = resolve_rollout_hooks(settings, registry)
    return {
        "rollout_fn": resolve(
            "slime.rollouts",
            rollout.rollout_function_path,
            where="rollout.rollout_function_args",
            explicit=rollout.rollout_function_args,
        ),
        "generate": resolve(
            "slime.generators",
            rollout.custom_generate_function_path,
            where="rollout.custom_generate_function_args",
            explicit=rollout.custom_generate_function_args,
        ),
        "eval_fn": resolve_eval_function(settings, registry),
        "drop_reason": dropping_filter(settings, registry),
        "user_hooks": hooks,
        "make_batch": functools.partial(
            make_batch,
            global_batch_size=batch_sizes(settings).global_batch_size,
            temperature=rollout.rollout_temperature,
            transform=transform,
            reducer=chosen.reducer,
            reward_key=settings.reward.reward_key,
            reward_parts=chosen.reward_parts,
            shaping=_shaping(settings),
            memory=ReusedMemory(),
            convert=None if hooks.convert is None else functools.partial(converted, hooks.convert, settings),
        ),
    }


def resolve_eval_function(settings: Settings, registry: Registry) -> EvalFn:
    """Return the function of evaluations, options bound; raises as `algorithm` does.

    Where none is chosen, it is the one that goes with the rollout function, its attribute `evaluates`, if that has one.
    """
    section, rollout = settings.eval, settings.rollout
    if means(section.eval_function_path, "slime-core/default"):
        goes_with_it: EvalFn | None = getattr(
            resolve_function(
                settings,
                registry,
                "slime.rollouts",
                rollout.rollout_function_path,
                where="rollout.rollout_function_args",
                explicit=rollout.rollout_function_args,
            ),
            "evaluates",
            None,
        )
        if goes_with_it is not None:
            if given := section.eval_function_args:
                wanted = f"none: {rollout.rollout_function_path} brings its own evaluation, which takes none"
                raise ConfigError([Problem("eval.eval_function_args", shown(given), wanted)])
            return goes_with_it
    return resolve_function(
        settings,
        registry,
        "slime.eval_functions",
        section.eval_function_path,
        where="eval.eval_function_args",
        explicit=section.eval_function_args,
    )


def _shaping(settings: Settings) -> Callable[[NDArray[np.int64]], NDArray[np.float64]] | None:
    """Return the length penalty on rewards; None without one."""
    reward = settings.reward
    if reward.overlong_buffer_len is None:
        return None
    return functools.partial(
        overlong_penalty,
        max_response_len=settings.rollout.rollout_max_response_len,
        overlong_buffer_len=reward.overlong_buffer_len,
        overlong_penalty_factor=reward.overlong_penalty_factor,
    )


def dropping_filter(settings: Settings, registry: Registry) -> Callable[[Group], str | None]:
    """Return the dynamic sampling filter, options bound: the reason to drop a group, or None; raises as `algorithm` does."""
    rollout = settings.rollout
    path = rollout.dynamic_sampling_filter_path
    if path is None:
        return failure_of
    explicit = dict(rollout.filter_args)
    key = settings.reward.reward_key
    function = registry.resolve("slime.filters", path)
    if key is not None and "reward_key" in parameters_of(function):
        explicit.setdefault("reward_key", key)
    keep = resolve_function(
        settings, registry, "slime.filters", path, where="rollout.filter_args", explicit=explicit
    )
    return lambda group: failure_of(group) or _reason(path, group, keep(group))


def _reason(path: str, group: Group, answer: Any) -> str | None:
    """Return a filter's answer, if it is one: a filter that says True may mean either."""
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise PluginError(
        f"{group[0].name}: the filter {path} returned {shown(answer)}; wanted None to keep the group, or the reason to "
        "drop it, as text"
    )


def _num_steps(settings: Settings, source: DataSource) -> int:
    run = settings.run
    if run.num_rollout is not None:
        return run.num_rollout
    size = settings.rollout.rollout_batch_size
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
