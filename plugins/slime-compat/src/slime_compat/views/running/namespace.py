"""`Args`: the settings of a run as hooks of the reference system read them, one namespace of all its flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from slime_compat.flags.names import NAMES

#: Names that exist where an engine is at hand, in functions that generate.
ENGINE_NAMES = ("sglang_router_ip", "sglang_router_port")
#: What names are where no setting of the run says otherwise: flags of theirs None or as below, and what follows from flags there.
DEFAULTS: Mapping[str, Any] = {
    **{name: None for names in NAMES.values() for name in names},
    "debug_rollout_only": False,
    "debug_train_only": False,
    "load_debug_rollout_data": None,
    "save_debug_rollout_data": None,
    "rollout_external": False,
    "use_fault_tolerance": False,
    "rollout_task_type": "math",
    "rollout_buffer_url": None,
    "fetch_trajectory_retry_times": -1,
    "rm_url": None,
    "log_multi_turn": False,
    "log_passrate": False,
    "log_reward_category": None,
    "log_correct_samples": False,
    "use_distributed_post": False,
    "use_slime_router": False,
    "use_rollout_routing_replay": False,
    "use_routing_replay": False,
    "use_tis": False,
    "use_opd": False,
    "opd_type": None,
    "get_mismatch_metrics": False,
    "use_kl_loss": False,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "entropy_coef": 0.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "ref_load": None,
    "grpo_std_normalization": True,
    "rewards_normalization": True,
    "sglang_enable_deterministic_inference": False,
    "sglang_speculative_algorithm": None,
    "sglang_server_concurrency": 512,
    "sglang_router_policy": None,
    "sglang_model_routers": None,
    "sglang_dp_size": 1,
    "rollout_num_gpus": None,
    "rollout_num_gpus_per_engine": 1,
    "num_gpus_per_node": 8,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_wandb": False,
    "wandb_always_use_train_step": False,
    "use_tensorboard": False,
    "dump_details": None,
    "ci_test": False,
    "qkv_format": "thd",
    "custom_config_path": None,
    "balance_data": False,
    "start_rollout_id": 0,
    "rank": 0,
    "world_size": 1,
}


#: Name that follows from settings of other names -> those.
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "use_critic": ("advantage_estimator",),
    "rollout_global_dataset": ("disable_rollout_global_dataset",),
    "grpo_std_normalization": ("disable_grpo_std_normalization",),
    "rewards_normalization": ("disable_rewards_normalization",),
    "global_batch_size": ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"),
    "over_sampling_batch_size": ("rollout_batch_size",),
    "eval_reward_key": ("reward_key",),
    "eval_max_response_len": ("rollout_max_response_len",),
    "sglang_server_concurrency": ("rollout_concurrency",),
    "rollout_num_gpus": (
        "colocate",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "rollout_num_gpus_per_engine",
    ),
    "save": ("output_dir", "run_name"),
}
#: Attribute that holds what stands behind.
_BEHIND = "_settings_of_ours"


class Args(argparse.Namespace):
    """Settings by the names of their flags; a hook may set more, for itself.

    Args:
        values: what `slime_core.config.functions.run_args` returns; None knows no run.
        more: what comes before these.
    """

    def __init__(self, values: Mapping[str, Any] | None, **more: Any) -> None:
        given = values or {}
        super().__init__(**{**DEFAULTS, **given, **_derived(given), **_custom(given), **more})

    def before(self, settings: Any) -> Args:
        """Return this, with what ours gives as `args` behind it: functions of either system find theirs."""
        vars(self)[_BEHIND] = settings
        return self

    def __getattr__(self, name: str) -> Any:
        """Return what stands behind, or say that there is no such setting.

        Raises:
            AttributeError: there is none, so that `getattr(args, name, default)` and `hasattr` work.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        if _BEHIND in vars(self) and hasattr(vars(self)[_BEHIND], name):
            return getattr(vars(self)[_BEHIND], name)
        why = "a setting of this run" if name not in ENGINE_NAMES else "there where functions generate"
        raise AttributeError(f"args has no {name!r}: it is not {why}; `slime config flags` lists settings")


def known_names(values: Mapping[str, Any]) -> Iterable[str]:
    """Return the names that `args` has in a run with these settings."""
    return {*DEFAULTS, *values, *_derived(values), *_custom(values), *ENGINE_NAMES}


def sources_of(names: Iterable[str]) -> frozenset[str]:
    """Return the settings from which those of some names may follow that are none themselves; see `_derived`.

    The table of Megatron's own flags is always one: each of them is a name, whatever it is.
    """
    return frozenset({"megatron_args", *(source for name in names for source in _SOURCES.get(name, ()))})


def _custom(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `--custom-config-path` that are no settings."""
    return dict(values.get("custom_config") or {})


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from settings there."""
    if not values:
        return {}
    estimator = str(values.get("advantage_estimator"))
    prompts, n = values["rollout_batch_size"], values["n_samples_per_prompt"]
    steps = values.get("num_steps_per_rollout")
    folder = f"{values['output_dir']}/{values['run_name']}"
    return {
        "use_critic": estimator in ("ppo", "gae", "vapo"),
        "rollout_global_dataset": not values["disable_rollout_global_dataset"],
        "grpo_std_normalization": not values["disable_grpo_std_normalization"],
        "rewards_normalization": not values["disable_rewards_normalization"],
        "over_sampling_batch_size": values["over_sampling_batch_size"] or prompts,
        "global_batch_size": values["global_batch_size"] or prompts * n // (steps or 1),
        "eval_reward_key": values["eval_reward_key"] or values["reward_key"],
        "eval_max_response_len": values["eval_max_response_len"] or values["rollout_max_response_len"],
        "sglang_server_concurrency": values["rollout_concurrency"]
        if isinstance(values["rollout_concurrency"], int)
        else DEFAULTS["sglang_server_concurrency"],
        "rollout_stop": values["rollout_stop"] or None,
        "rollout_stop_token_ids": values["rollout_stop_token_ids"] or None,
        **{name: _number(value) for name, value in (values.get("megatron_args") or {}).items()},
        "use_dynamic_batch_size": True,
        "rollout_num_engines": 1,
        "rollout_num_gpus": values.get("rollout_num_gpus")
        or (values["colocate"] and values["actor_num_nodes"] * values["actor_num_gpus_per_node"])
        or values.get("rollout_num_gpus_per_engine")
        or 1,
        "save": folder,
        "model_name": values.get("model_name"),
    }


def _number(text: Any) -> Any:
    """Return a number that is written as text; everything else as it is."""
    for kind in (int, float):
        try:
            return kind(text) if isinstance(text, str) else text
        except ValueError:
            continue
    return text
