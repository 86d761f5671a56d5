"""A configuration of verl as a recipe of slime, and every key that has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import shown

from slime_compat.verl.keys import IDLE, IDLE_AT, KEYS, Read, count, number, whole

#: verl's own values of what a recipe needs, where the configuration does not say it.
DEFAULTS: Mapping[str, Any] = {
    "data.prompt_key": "prompt", "data.max_prompt_length": 512, "data.max_response_length": 512, "data.train_batch_size": 1024,
    "data.shuffle": True, "actor_rollout_ref.hybrid_engine": True, "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01, "actor_rollout_ref.actor.kl_loss_coef": 0.001, "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False, "algorithm.adv_estimator": "gae", "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001, "trainer.total_epochs": 30, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
}  # fmt: skip
#: Keys that `_Recipe` deals with together.
_TOGETHER = frozenset({
    "data.train_files", "data.train_max_samples", "data.val_files", "data.truncation", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.optim.betas", "actor_rollout_ref.rollout.val_kwargs.do_sample", "actor_rollout_ref.model.target_modules",
    "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl", "algorithm.filter_groups.enable",
    "algorithm.filter_groups.max_num_gen_batches", "custom_reward_function.path", "custom_reward_function.name",
    "reward_model.enable", "reward_model.reward_manager", "reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.log",
    "trainer.logger", "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold",
})  # fmt: skip
#: Keys whose null verl does not take, either.
_NEEDED = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
_REWARD_KWARGS = "custom_reward_function.reward_kwargs."
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."
#: Names of trackers here.
_TRACKERS = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "swanlab": "swanlab",
             "trackio": "trackio"}  # fmt: skip


@dataclass
class Imported:
    """A recipe, and what it lacks of the configuration that it was made of."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> setting -> value."""
    without: dict[str, str] = field(default_factory=dict)
    """Key of verl's that has no counterpart -> its value, shown."""
    notes: list[str] = field(default_factory=list)
    """What is otherwise than it was."""
    problems: list[Problem] = field(default_factory=list)

    def table(self, section: str) -> dict[str, Any]:
        """Return what is set of a section so far."""
        return self.tables.get(section, {})

    def put(self, to: str, value: Any) -> None:
        """Set a setting, `section.setting`, or an entry of one that is a table."""
        section, setting, *entry = to.split(".")
        table = self.tables.setdefault(section, {})
        if entry:
            table.setdefault(setting, {})[entry[0]] = value
        else:
            table[setting] = value


def imported(config: Mapping[str, Any]) -> Imported:
    """Return the recipe of a configuration, its keys dotted.

    Raises:
        ConfigError: a value has a meaning that slime does not have; names all of them.
    """
    config = {_renamed(key): value for key, value in config.items()}
    given = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    recipe = Imported()
    recipe.put("algorithm.numerics", "verl")
    recipe.put("data.apply_chat_template", True)
    recipe.problems += [
        Problem(key, "null", "a whole number above 0") for key in _NEEDED if config.get(key, 1) is None
    ]
    for key, value in given.items():
        _one(recipe, key, value, is_given=key in config)
    for rule in (
        _files,
        _batches,
        _optimizer,
        _kl,
        _estimator,
        _evaluation,
        _reward,
        _correction,
        _trackers,
        _cluster,
    ):
        rule(recipe, given)
    if recipe.problems:
        raise ConfigError(recipe.problems)
    return recipe


def _renamed(key: str) -> str:
    """Return where verl had a key before."""
    return key.replace(_OVERLONG, "reward_model.overlong_buffer.")


def _one(recipe: Imported, key: str, value: Any, *, is_given: bool) -> None:
    if key in KEYS:
        try:
            read = KEYS[key].read(_bare(key, value))
        except (TypeError, ValueError, OverflowError) as error:
            recipe.problems.append(Problem(key, shown(value), str(error)))
            return
        if read is not None and KEYS[key].to:
            recipe.put(KEYS[key].to, read)
        if KEYS[key].to == "rollout.rollout_engine" and value != "sglang":
            recipe.notes.append(f"{key}: {value} becomes {read}")
        return
    is_idle = any(
        key == idle or key.startswith((f"{idle}.", idle) if idle.endswith("_") else f"{idle}.")
        for idle in IDLE
    )
    is_idle = is_idle or (key in IDLE_AT and value == IDLE_AT[key][0])
    if is_given and not is_idle and key not in _TOGETHER and not key.startswith(_REWARD_KWARGS):
        recipe.without[key] = shown(value)


def _bare(key: str, value: Any) -> Any:
    return value.rstrip("+") if key.endswith("kl_loss_type") and isinstance(value, str) else value


def _read(recipe: Imported, given: Mapping[str, Any], key: str, read: Read, *, default: Any = None) -> Any:
    """Return a value as it is read, or None and a problem where it is not what it is to be."""
    value = given.get(key, default)
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError) as error:
        recipe.problems.append(Problem(key, shown(value), str(error)))
        return None


def _files(recipe: Imported, given: Mapping[str, Any]) -> None:
    files = _read(recipe, given, "data.train_files", _listed)
    if files == []:
        recipe.problems.append(Problem("data.train_files", "nothing", "a file of prompts"))
    most = _read(recipe, given, "data.train_max_samples", whole, default=-1)
    if files and most is not None and most > 0:
        if len(files) == 1:
            files = [f"{files[0]}@[0:{most}]"]
            recipe.notes.append(f"data.train_max_samples: the first {most} rows, also where verl draws them")
        else:
            recipe.without["data.train_max_samples"] = shown(most)
    recipe.put("data.prompt_data", _names_and(files) if files and len(files) > 1 else files)
    recipe.put("data.label_key", "reward_model.ground_truth")  # as verl's own data files have it
    recipe.put("data.metadata_key", "*")
    held_out = _read(recipe, given, "data.val_files", _listed)
    if held_out and recipe.tables.get("eval", {}).get("eval_interval") is not None:
        recipe.put("eval.eval_prompt_data", _names_and(held_out))
    elif "eval" in recipe.tables:
        recipe.tables["eval"].pop("eval_interval", None)
    if given.get("data.truncation") not in (None, "error"):
        recipe.without["data.truncation"] = shown(given["data.truncation"])


def _names_and(files: list[str]) -> list[str]:
    """Return names and files in turn: each by its own name, and a number where two have one."""
    stems = [Path(file).stem for file in files]
    names = [stem if stems.count(stem) == 1 else f"{stem}-{n}" for n, stem in enumerate(stems, 1)]
    return [word for pair in zip(names, files, strict=True) for word in pair]


def _batches(recipe: Imported, given: Mapping[str, Any]) -> None:
    name = "actor_rollout_ref.actor.ppo_mini_batch_size"
    prompts = recipe.table("rollout").get("rollout_batch_size")
    mini = _read(recipe, given, name, count, default=min(256, prompts or 256))
    if prompts is None or mini is None:
        return
    if prompts % mini:
        wanted = f"a divisor of data.train_batch_size, {prompts}"
        recipe.problems.append(Problem(name, str(mini), wanted))
        return
    recipe.put("train.num_steps_per_rollout", prompts // mini)
    for key in KEYS.values():
        section, _, setting = key.to.partition(".")
        if key.times_steps and setting in recipe.table(section):
            recipe.put(key.to, recipe.table(section)[setting] * (prompts // mini))


def _optimizer(recipe: Imported, given: Mapping[str, Any]) -> None:
    betas = _read(recipe, given, "actor_rollout_ref.actor.optim.betas", _pair, default=(0.9, 0.999))
    for setting, beta in zip(("train.adam_beta1", "train.adam_beta2"), betas or (), strict=False):
        recipe.put(setting, beta)
    if "rank" not in recipe.table("lora"):
        recipe.tables.pop("lora", None)
    if (targets := given.get("actor_rollout_ref.model.target_modules")) not in (None, "all-linear"):
        recipe.without["actor_rollout_ref.model.target_modules"] = shown(targets)


def _kl(recipe: Imported, given: Mapping[str, Any]) -> None:
    is_straight = str(given.get("actor_rollout_ref.actor.kl_loss_type", "")).endswith("+")
    if is_straight and recipe.table("algos").get("use_kl_loss"):  # nothing reads it without
        recipe.put("algos.kl_straight_through", True)
    if not given.get("algorithm.use_kl_in_reward"):
        return
    recipe.put("algos.kl_coef", _read(recipe, given, "algorithm.kl_ctrl.kl_coef", number))
    kind = _read(recipe, given, "algorithm.kl_penalty", KEYS["actor_rollout_ref.actor.kl_loss_type"].read)
    algos = recipe.table("algos")
    if algos.get("use_kl_loss") and algos.get("kl_loss_type", kind) != kind:
        recipe.without["algorithm.kl_penalty"] = shown(given["algorithm.kl_penalty"])
    else:
        recipe.put("algos.kl_loss_type", kind)
    if given.get("algorithm.kl_ctrl.type") == "adaptive":
        for name, key, default in (("kl_target", "target_kl", 0.1), ("kl_horizon", "horizon", 10000.0)):
            value = _read(recipe, given, f"algorithm.kl_ctrl.{key}", number, default=default)
            recipe.put(f"algos.{name}", value)


def _estimator(recipe: Imported, given: Mapping[str, Any]) -> None:
    if recipe.table("algorithm").get("advantage_estimator") in (
        "ppo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ):
        recipe.put("algos.normalize_advantages", True)  # as verl always does
    if recipe.table("algorithm").get("advantage_estimator") != "ppo":
        for name in ("critic_lr", "critic_load", "critic_lr_warmup_iters", "num_critic_only_steps"):
            recipe.tables.get("roles", {}).pop(name, None)
    elif recipe.tables.get("roles", {}).get("num_critic_only_steps") == 0:
        del recipe.tables["roles"]["num_critic_only_steps"]
    if given.get("algorithm.filter_groups.enable"):
        recipe.put("rollout.dynamic_sampling_filter_path", "nonzero-std")
        most = _read(recipe, given, "algorithm.filter_groups.max_num_gen_batches", whole, default=0)
        if most is not None and most > 0:
            recipe.put("rollout.dynamic_sampling_max_waves", most)


def _evaluation(recipe: Imported, given: Mapping[str, Any]) -> None:
    evaluation = recipe.tables.get("eval", {})
    if not given["actor_rollout_ref.rollout.val_kwargs.do_sample"]:
        evaluation.pop("eval_temperature", None)  # greedy, as slime evaluates
    elif "eval_temperature" not in evaluation:
        recipe.put("eval.eval_temperature", 1.0)
    if "eval_interval" not in evaluation:
        recipe.tables.pop("eval", None)


def _reward(recipe: Imported, given: Mapping[str, Any]) -> None:
    if given.get("reward_model.enable"):
        recipe.without["reward_model.enable"] = "true"
        recipe.notes.append(
            "reward_model.enable: a served reward model is --rm-type reward_model with --reward-model-url"
        )
    manager = given.get("reward_model.reward_manager", "naive")
    if manager not in ("naive", "batch", "dapo"):
        recipe.without["reward_model.reward_manager"] = shown(manager)
    if not given.get("reward_model.overlong_buffer.enable"):
        for name in ("overlong_buffer_len", "overlong_penalty_factor"):
            recipe.tables.get("reward", {}).pop(name, None)
    if path := given.get("custom_reward_function.path"):
        kwargs = {
            key.removeprefix(_REWARD_KWARGS): value
            for key, value in given.items()
            if key.startswith(_REWARD_KWARGS)
        }
        arguments = {
            "path": str(path),
            "function": str(given.get("custom_reward_function.name") or "compute_score"),
        }
        recipe.put("reward.rm_type", "verl")
        recipe.put("reward.rm_args", arguments | ({"reward_kwargs": kwargs} if kwargs else {}))
    else:
        recipe.put("reward.rm_type", "dapo" if manager == "dapo" else "math")
        recipe.notes.append(
            f"verl chooses its reward by the row's data_source; the recipe has rm_type {recipe.tables['reward']['rm_type']!r}: "
            "choose by `slime rm list`"
        )


def _correction(recipe: Imported, given: Mapping[str, Any]) -> None:
    level = given.get("algorithm.rollout_correction.rollout_is")
    if level:
        recipe.put("algos.use_tis", True)
        recipe.put("algos.tis_level", level)
        threshold = "algorithm.rollout_correction.rollout_is_threshold"
        recipe.put("algos.tis_clip", _read(recipe, given, threshold, number, default=2.0))


def _trackers(recipe: Imported, given: Mapping[str, Any]) -> None:
    names = _read(recipe, given, "trainer.logger", _listed) or []
    unknown = [name for name in names if name not in _TRACKERS]
    chosen = [_TRACKERS[name] for name in names if name in _TRACKERS]
    if unknown:
        recipe.without["trainer.logger"] = ", ".join(unknown)
    recipe.put("run.tracker", list(dict.fromkeys([*chosen, "console", "jsonl", "plot"])))
    if "wandb" not in chosen:
        recipe.tables.pop("wandb", None)


def _cluster(recipe: Imported, given: Mapping[str, Any]) -> None:
    cluster = recipe.table("cluster")
    ranks = cluster.get("actor_num_gpus_per_node", 1) * cluster.get("actor_num_nodes", 1)
    if ranks > 1 or cluster.get("colocate"):
        recipe.put("run.launcher", "ray")
    if recipe.table("run").get("num_rollout") is not None:
        recipe.table("run").pop("num_epoch", None)
    if recipe.table("rollout").get("rollout_engine") != "sglang":
        recipe.tables.pop("fleet", None)
        recipe.tables.pop("sglang", None)


def _listed(value: Any) -> list[str]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in values):
        raise ValueError("text, or a list of it")
    return list(values)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a list of two numbers")
    return number(value[0]), number(value[1])
