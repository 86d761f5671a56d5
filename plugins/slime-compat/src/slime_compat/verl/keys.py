"""verl's keys, and the settings of slime that each becomes: the one source of the command and of its page."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: What a value becomes: None where there is nothing to set.
Read = Callable[[Any], Any]


@dataclass(frozen=True)
class Key:
    """What one of verl's keys becomes."""

    to: str
    """`section.setting`; `section.setting.entry` of one that is a table."""
    read: Read
    note: str = ""
    """For the page: what is otherwise."""
    times_steps: bool = False
    """Whether verl counts rollouts where the setting counts optimizer steps: it is multiplied by those of a rollout."""


def _same(value: Any) -> Any:
    return value


def number(value: Any) -> float:
    """Return a finite number, also where it is written as text.

    Raises:
        ValueError: it is none.
    """
    read = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            read = float(value)
    if not math.isfinite(read):
        raise ValueError("a number")
    return read


def whole(value: Any) -> int:
    """Return a whole number, also where it is written as text.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,18}", value.strip()):
        return int(value)
    if isinstance(value, bool | str) or number(value) != int(value):
        raise ValueError("a whole number")
    return int(value)


def count(value: Any) -> int:
    """Return a whole number above 0.

    Raises:
        ValueError: it is none.
    """
    if (read := whole(value)) < 1:
        raise ValueError("a whole number above 0")
    return read


def _positive(value: Any) -> int | None:
    return read if (read := whole(value)) > 0 else None


def _top_k(value: Any) -> int:
    return -1 if whole(value) <= 0 else whole(value)


def _unless(neutral: object) -> Read:
    return lambda value: None if value == neutral else value


def _named(names: Mapping[Any, Any]) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, str | None) or value not in names:
            raise ValueError(f"one of {', '.join(map(str, names))}")
        return names[value]

    return read


def _only(wanted: Any, why: str) -> Read:
    def read(value: Any) -> None:
        if value != wanted:
            raise ValueError(f"{wanted}: {why}")

    return read


#: Note of what is counted in rollouts there: verl's schedulers step once for each of them.
_TIMES_STEPS = "verl counts rollouts, slime optimizer steps: times data.train_batch_size / ppo_mini_batch_size of the actor"
_A, _R, _C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "grpo_passk": "grpo_passk", "rloo": "rloo", "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "remax": "remax",
    "opo": "opo", "gpg": "gpg", "optimal_token_baseline": "optimal_token_baseline",
}  # fmt: skip
_LOSSES = {
    "vanilla": None, "gspo": "gspo_loss", "gpg": "policy_gradient_loss", "clip_cov": "clip_cov_loss", "kl_cov": "kl_cov_loss",
    "geo_mean": "geo_mean_loss", "cispo": "cispo_loss", "sapo": "sapo_loss",
}  # fmt: skip
_REDUCERS = {
    "token-mean": "token-mean", "seq-mean-token-sum": "sequence-sum", "seq-mean-token-mean": "sample-mean",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_KL = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl",
}  # fmt: skip

#: verl's key -> what it becomes. Those that belong together, and the files, are in `verl.convert`.
KEYS: Mapping[str, Key] = {
    "data.prompt_key": Key("data.input_key", _same),
    "data.max_prompt_length": Key(
        "data.rollout_max_prompt_len", count, "longer prompts are dropped, not cut"
    ),
    "data.max_response_length": Key("rollout.rollout_max_response_len", count),
    "data.train_batch_size": Key("rollout.rollout_batch_size", count),
    "data.gen_batch_size": Key("rollout.over_sampling_batch_size", count),
    "data.val_max_samples": Key("eval.eval_num_prompts", _positive, "the first of each file"),
    "data.shuffle": Key("data.rollout_shuffle", bool),
    "data.seed": Key("rollout.rollout_seed", _same),
    "data.apply_chat_template_kwargs": Key("data.apply_chat_template_kwargs", _unless({})),
    "actor_rollout_ref.model.path": Key("model.hf_checkpoint", _same),
    "actor_rollout_ref.model.lora_rank": Key("lora.rank", _positive),
    "actor_rollout_ref.model.lora_alpha": Key("lora.alpha", number, "only with a rank"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Key(
        "megatron.recompute_granularity", lambda value: "full" if value else None
    ),
    "actor_rollout_ref.hybrid_engine": Key("cluster.colocate", bool),
    f"{_A}.ppo_max_token_len_per_gpu": Key("train.max_tokens_per_gpu", count),
    f"{_A}.ppo_epochs": Key("", _only(1, "samples of a step are trained on once"), "must be 1"),
    f"{_A}.grad_clip": Key("train.clip_grad", number),
    f"{_A}.clip_ratio": Key("algos.eps_clip", number),
    f"{_A}.clip_ratio_low": Key("algos.eps_clip", number),
    f"{_A}.clip_ratio_high": Key("algos.eps_clip_high", number),
    f"{_A}.clip_ratio_c": Key("algos.eps_clip_c", number),
    f"{_A}.entropy_coeff": Key("algos.entropy_coef", number),
    f"{_A}.use_kl_loss": Key("algos.use_kl_loss", bool),
    f"{_A}.kl_loss_coef": Key("algos.kl_loss_coef", number),
    f"{_A}.kl_loss_type": Key("algos.kl_loss_type", _named(_KL), "a `+` at its end is --kl-straight-through"),
    f"{_A}.loss_agg_mode": Key("algorithm.loss_reducer", _named(_REDUCERS)),
    f"{_A}.policy_loss.loss_mode": Key("algorithm.loss_type", _named(_LOSSES)),
    f"{_A}.shuffle": Key("", _only(False, "optimizer steps take samples in their order"), "must be false"),
    f"{_A}.ulysses_sequence_parallel_size": Key(
        "megatron.context_parallel_size", _unless(1), "Megatron's context parallelism"
    ),
    f"{_A}.optim.lr": Key("train.lr", number),
    f"{_A}.optim.weight_decay": Key("train.weight_decay", number),
    f"{_A}.optim.lr_warmup_steps": Key("train.lr_warmup_iters", _positive, _TIMES_STEPS, times_steps=True),
    f"{_A}.optim.warmup_style": Key(
        "train.lr_decay_style", _named({"constant": "constant", "cosine": "cosine", None: None})
    ),
    f"{_A}.optim.lr_scheduler_type": Key(
        "train.lr_decay_style", _named({"constant": "constant", "cosine": "cosine"})
    ),
    f"{_A}.megatron.tensor_model_parallel_size": Key("megatron.tensor_model_parallel_size", count),
    f"{_A}.megatron.pipeline_model_parallel_size": Key("megatron.pipeline_model_parallel_size", count),
    f"{_A}.megatron.context_parallel_size": Key("megatron.context_parallel_size", count),
    f"{_A}.megatron.expert_model_parallel_size": Key("megatron.expert_model_parallel_size", count),
    f"{_A}.megatron.expert_tensor_parallel_size": Key("megatron.expert_tensor_parallel_size", _same),
    f"{_A}.megatron.sequence_parallel": Key("megatron.sequence_parallel", bool),
    f"{_R}.name": Key(
        "rollout.rollout_engine",
        _named({"sglang": "sglang", "vllm": "sglang", "hf": "torch"}),
        "vllm becomes sglang",
    ),
    f"{_R}.n": Key("rollout.n_samples_per_prompt", count),
    f"{_R}.temperature": Key("rollout.rollout_temperature", number),
    f"{_R}.top_p": Key("rollout.rollout_top_p", number),
    f"{_R}.top_k": Key("rollout.rollout_top_k", _top_k),
    f"{_R}.tensor_model_parallel_size": Key("fleet.rollout_num_gpus_per_engine", count),
    f"{_R}.gpu_memory_utilization": Key(
        "sglang.server_args.mem_fraction_static", number, "a share of what is free, weights included"
    ),
    f"{_R}.max_model_len": Key("rollout.rollout_max_context_len", _same),
    f"{_R}.max_num_seqs": Key("sglang.server_args.max_running_requests", count),
    f"{_R}.val_kwargs.n": Key("eval.n_samples_per_eval_prompt", count),
    f"{_R}.val_kwargs.temperature": Key("eval.eval_temperature", number),
    f"{_R}.val_kwargs.top_p": Key("eval.eval_top_p", number),
    f"{_R}.val_kwargs.top_k": Key("eval.eval_top_k", _top_k),
    f"{_C}.optim.lr": Key("roles.critic_lr", number),
    f"{_C}.optim.lr_warmup_steps": Key(
        "roles.critic_lr_warmup_iters", _positive, _TIMES_STEPS, times_steps=True
    ),
    f"{_C}.model.path": Key("roles.critic_load", _same),
    f"{_C}.cliprange_value": Key("algos.value_clip", number),
    "algorithm.adv_estimator": Key("algorithm.advantage_estimator", _named(_ESTIMATORS)),
    "algorithm.gamma": Key("algos.gamma", number),
    "algorithm.lam": Key("algos.lambd", number),
    "algorithm.norm_adv_by_std_in_grpo": Key(
        "algorithm.disable_grpo_std_normalization", lambda value: None if value else True
    ),
    "reward_model.overlong_buffer.len": Key("reward.overlong_buffer_len", whole, "where it is enabled"),
    "reward_model.overlong_buffer.penalty_factor": Key(
        "reward.overlong_penalty_factor", number, "where it is enabled"
    ),
    "reward_model.num_workers": Key("reward.reward_workers", count),
    "trainer.total_epochs": Key("run.num_epoch", count),
    "trainer.total_training_steps": Key("run.num_rollout", _same),
    "trainer.n_gpus_per_node": Key("cluster.actor_num_gpus_per_node", count),
    "trainer.nnodes": Key("cluster.actor_num_nodes", count),
    "trainer.save_freq": Key("checkpoint.save_interval", _positive),
    "trainer.test_freq": Key("eval.eval_interval", _positive),
    "trainer.val_before_train": Key("eval.skip_eval_before_train", lambda value: None if value else True),
    "trainer.project_name": Key("wandb.project", _same),
    "trainer.experiment_name": Key("run.run_name", _same),
    "trainer.default_local_dir": Key("run.output_dir", _same, "the run's folder is below it"),
    "trainer.critic_warmup": Key("roles.num_critic_only_steps", whole),
    "trainer.balance_batch": Key("megatron.balance_data", bool),
    "trainer.max_actor_ckpt_to_keep": Key("checkpoint.keep_checkpoints", _same),
    "trainer.ray_wait_register_center_timeout": Key(
        "", lambda value: None, "every wait has a deadline of its own"
    ),
}

#: Keys that need nothing here, or the beginnings of theirs -> why.
IDLE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            f"{_A}.ppo_micro_batch_size", f"{_A}.ppo_micro_batch_size_per_gpu", f"{_A}.use_dynamic_bsz", f"{_R}.log_prob_",
            "actor_rollout_ref.ref.log_prob_", f"{_C}.ppo_micro_batch_size", f"{_C}.ppo_micro_batch_size_per_gpu",
            f"{_C}.forward_", f"{_C}.ppo_max_token_len_per_gpu", f"{_C}.use_dynamic_bsz",
        ),
        "how a step is cut into micro-batches changes no gradient; --max-tokens-per-gpu is their size",
    ),
    f"{_A}.use_torch_compile": "the trainer chooses its kernels",
    "actor_rollout_ref.model.use_remove_padding": "rows are always packed",
    f"{_C}.model.use_remove_padding": "rows are always packed",
    f"{_C}.model.enable_gradient_checkpointing": "the critic recomputes what the policy does",
    f"{_A}.strategy": "the trainer is Megatron",
    f"{_C}.strategy": "the trainer is Megatron",
    "actor_rollout_ref.ref.strategy": "the reference is weights of the policy's own model, or by --ref-num-gpus-per-node in ranks of its own",
    **dict.fromkeys(
        (f"{_A}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", f"{_C}.model.fsdp_config"),
        "sharding and offloading are --use-distributed-optimizer, --optimizer-cpu-offload and --offload-train",
    ),
    **dict.fromkeys(
        (f"{_R}.enforce_eager", f"{_R}.free_cache_engine", f"{_R}.load_format", f"{_R}.dtype", f"{_R}.mode",
         f"{_R}.disable_log_stats", f"{_R}.enable_chunked_prefill", f"{_R}.max_num_batched_tokens", f"{_R}.prompt_length",
         f"{_R}.response_length", f"{_R}.calculate_log_probs"),
        "it is how the engine works here anyway, or --sglang-* says it",
    ),
    "data.filter_overlong_prompts": "longer prompts are always dropped",
    "data.return_raw_": "prompts are there as messages and as ids",
    "data.val_batch_size": "an evaluation is all of its prompts at once",
    f"{_C}.ppo_mini_batch_size": "the critic takes the policy's optimizer steps",
    "algorithm.filter_groups.metric": "the filter looks at the score before the overlong penalty",
    "trainer.rollout_data_dir": "every sample is recorded in the run's folder",
    "trainer.validation_data_dir": "every sample is recorded in the run's folder",
    "trainer.log_val_generations": "every sample is recorded in the run's folder",
}  # fmt: skip
#: Keys that need nothing here for this value -> the value, and why. Another value has no counterpart.
IDLE_AT: Mapping[str, tuple[Any, str]] = {
    f"{_R}.ignore_eos": (False, "a response ends at its end-of-sequence token"),
    f"{_C}.ppo_epochs": (1, "the critic takes the policy's optimizer steps"),
    "trainer.resume_mode": (
        "auto",
        "the same command goes on where the run was; a new --output-dir begins anew",
    ),
    "trainer.device": ("cuda", "it is CUDA where there is a GPU"),
    "data.reward_fn_key": ("data_source", "the reward gets all columns of the row"),
}
