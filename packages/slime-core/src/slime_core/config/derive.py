"""Values that follow from settings, built by pure functions; settings themselves are never changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.config.sections import (
    RewardSection,
    RunSection,
    TrainSection,
)
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.own_name import means
from slime_core.protocols import Role

#: The data source that reads files.
FILE_SOURCE = "slime-core/file"
#: Loops: trainer and engine take turns; the engine is a step ahead; it never stops.
SYNC, ONE_STEP_OFF, FULLY_ASYNC = "slime-core/sync", "slime-core/one-step-off", "slime-core/fully-async"
#: The generator that sends a prompt with its images.
SINGLE_TURN = "slime-core/single-turn"
#: Setting of a run -> the tracker that it adds.
_ADDS = {f"use_{name}": name for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")}


def trackers(run: RunSection) -> list[str]:
    """Return the names of the trackers, each once."""
    added = (name for setting, name in _ADDS.items() if getattr(run, setting))
    return list(dict.fromkeys([*run.tracker, *added]))


def with_trackers(settings: Settings, *names: str, origin: str) -> Settings:
    """Return settings of a run whose trackers are these alone."""
    settings = settings.having("run", "tracker", list(names), origin=origin)
    for setting in _ADDS:
        settings = settings.having("run", setting, False, origin=origin)
    return settings


def compute_dtype(train: TrainSection) -> str:
    """Return the dtype that the trainer computes in, as torch spells it."""
    if train.fp16:
        return "float16"
    return "bfloat16" if train.bf16 else "float32"


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes of a step, in groups and samples.

    rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout.
    """

    rollout_batch_size: int
    """Prompts of a step."""
    n_samples_per_prompt: int
    """Samples of a prompt."""
    global_batch_size: int
    """Executions of an optimizer step."""
    num_steps_per_rollout: int
    """Optimizer steps of a step."""
    over_sampling_batch_size: int
    """Prompts taken in each wave of sampling."""


def batch_sizes(settings: Settings) -> BatchSizes:
    """Work out the batch sizes.

    Raises:
        ConfigError: they do not multiply out; the message holds the equation with its numbers.
    """
    rollout, train = settings.rollout, settings.train
    prompts, n = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    samples = prompts * n
    steps = train.num_steps_per_rollout or 1
    if train.global_batch_size is not None:
        size = train.global_batch_size
        steps = train.num_steps_per_rollout or max(1, samples // size)
    else:
        size = samples // steps
    problems = []
    if size * steps != samples:
        problems.append(
            Problem(
                "rollout.rollout_batch_size x rollout.n_samples_per_prompt = "
                "train.global_batch_size x train.num_steps_per_rollout",
                f"{prompts} x {n} = {samples}, and {size} x {steps} = {size * steps}",
                "equal products",
                f"set --global-batch-size to a divisor of {samples}",
            )
        )
    over = rollout.over_sampling_batch_size or prompts
    if over < prompts:
        problems.append(
            Problem(
                "rollout.over_sampling_batch_size",
                str(over),
                f"at least rollout_batch_size, {prompts}",
            )
        )
    if problems:
        raise ConfigError(problems)
    return BatchSizes(prompts, n, size, steps, over)


def is_local(run: RunSection) -> bool:
    """Return whether all parts of the run live in one process, which also starts its servers."""
    return means(run.launcher, "slime-core/local")


def num_ranks(settings: Settings, role: Role = "policy") -> int:
    """Return how many of the trainer's processes a role has of its own; 0 of one that is in the policy's."""
    section = settings.cluster
    of_policy = (section.actor_num_nodes, section.actor_num_gpus_per_node)
    machines, per_machine = of_policy if role == "policy" else section.pools.get(role, (0, 0))
    return machines * per_machine


def pool_setting(role: Role) -> str:
    """Return the settings, as problems name them, that give a role ranks of its own."""
    return f"cluster.{role}_num_nodes x cluster.{role}_num_gpus_per_node"


@dataclass(frozen=True)
class Choices:
    """The references that choose plugins, after the `custom_*` spellings have taken their places."""

    reward_group: str
    rewards: dict[str, float]
    """Rewards by name, and the weight of each; empty when none is chosen."""
    advantage: str
    loss: str | None
    """None for the loss that goes with the estimator."""
    reducer: str


def sends_images(settings: Settings) -> bool:
    """Return whether prompts have images that the engine gets, or other media: those of the generator `single-turn`.

    Other generators know best what becomes of theirs.
    """
    return bool(settings.data.multimodal_keys) and is_single_turn(settings)


def is_single_turn(settings: Settings) -> bool:
    """Return whether samples are one answer of the engine, in which nothing else has a say."""
    return means(settings.rollout.custom_generate_function_path, SINGLE_TURN)


def reward_group(reward: RewardSection) -> str:
    """Return the group that rewards are chosen from."""
    return "slime.group_rewards" if reward.group_rm else "slime.rewards"


def choices(settings: Settings) -> Choices:
    """Return which reward, estimator, loss and reducer are chosen.

    Raises:
        ConfigError: two settings choose different things for one place.
    """
    reward, algorithm = settings.reward, settings.algorithm
    problems = []
    named = [name for name in (reward.custom_rm_path, reward.rm_type) if name is not None]
    if len(named) + bool(reward.rm_weights) > 1:
        problems.append(
            Problem(
                "reward.rm_type, reward.custom_rm_path and reward.rm_weights",
                f"{reward.rm_type!r}, {reward.custom_rm_path!r} and {reward.rm_weights}",
                "one of them",
            )
        )
    if algorithm.disable_rewards_normalization and reward.custom_reward_post_process_path is not None:
        problems.append(
            Problem(
                "algorithm.disable_rewards_normalization and reward.custom_reward_post_process_path",
                f"both, the second {reward.custom_reward_post_process_path!r}",
                "one of them",
            )
        )
    if reward.rm_weights and reward.rm_args:
        problems.append(
            Problem(
                "reward.rm_args",
                "options beside reward.rm_weights",
                "reward.rm_args_of, by the reward's name",
            )
        )
    reducer = algorithm.custom_pg_loss_reducer_function_path or algorithm.loss_reducer
    if algorithm.calculate_per_token_loss:
        # What a recipe says may be the default that a run wrote into its folder.
        is_typed = settings.origin("algorithm", "loss_reducer").startswith("--")
        if reducer not in ("sample-mean", "token-mean") or (is_typed and reducer == "sample-mean"):
            problems.append(
                Problem(
                    "algorithm.calculate_per_token_loss", f"it beside the reducer {reducer!r}", "one of them"
                )
            )
        reducer = "token-mean"
    if problems:
        raise ConfigError(problems)
    return Choices(
        reward_group=reward_group(reward),
        rewards={named[0]: 1.0} if named else dict(reward.rm_weights),
        advantage=algorithm.custom_advantage_function_path or algorithm.advantage_estimator,
        loss=algorithm.custom_loss_function_path or algorithm.loss_type,
        reducer=reducer,
    )


def run_folder(settings: Settings) -> Path:
    """Return the folder of the run."""
    run = settings.run
    return Path(run.output_dir) / run.run_name
