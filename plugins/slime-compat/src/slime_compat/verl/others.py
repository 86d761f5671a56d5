"""Settings of TRL's GRPOConfig and of OpenRLHF's command line, and slime's: for people, and held against what can be set."""

from __future__ import annotations

from collections.abc import Mapping

#: Field of GRPOConfig -> `section.setting`.
TRL: Mapping[str, str] = {
    "learning_rate": "train.lr", "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1",
    "adam_beta2": "train.adam_beta2", "max_grad_norm": "train.clip_grad", "warmup_steps": "train.lr_warmup_iters",
    "lr_scheduler_type": "train.lr_decay_style", "bf16": "train.bf16", "gradient_checkpointing": "megatron.recompute_granularity",
    "num_generations": "rollout.n_samples_per_prompt", "generation_batch_size": "rollout.rollout_batch_size",
    "steps_per_generation": "train.num_steps_per_rollout", "max_completion_length": "rollout.rollout_max_response_len",
    "temperature": "rollout.rollout_temperature", "top_p": "rollout.rollout_top_p", "top_k": "rollout.rollout_top_k",
    "beta": "algos.kl_loss_coef", "epsilon": "algos.eps_clip", "epsilon_high": "algos.eps_clip_high", "delta": "algos.eps_clip_c",
    "loss_type": "algorithm.loss_reducer", "scale_rewards": "algorithm.disable_grpo_std_normalization",
    "importance_sampling_level": "algorithm.advantage_estimator", "reward_weights": "reward.rm_weights",
    "sync_ref_model": "roles.ref_update_interval", "ref_model_sync_steps": "roles.ref_update_interval",
    "use_vllm": "rollout.rollout_engine", "vllm_tensor_parallel_size": "fleet.rollout_num_gpus_per_engine",
    "vllm_mode": "cluster.colocate", "vllm_importance_sampling_correction": "algos.use_tis",
    "vllm_importance_sampling_cap": "algos.tis_clip", "shuffle_dataset": "data.rollout_shuffle", "seed": "run.seed",
    "chat_template_kwargs": "data.apply_chat_template_kwargs", "max_steps": "run.num_rollout", "num_train_epochs": "run.num_epoch",
    "save_steps": "checkpoint.save_interval", "eval_steps": "eval.eval_interval", "output_dir": "run.output_dir",
    "run_name": "run.run_name", "report_to": "run.tracker", "save_total_limit": "checkpoint.keep_checkpoints",
}  # fmt: skip
#: Flag of OpenRLHF's `train_ppo_ray` -> `section.setting`.
OPENRLHF: Mapping[str, str] = {
    "--pretrain": "model.hf_checkpoint", "--reward_pretrain": "rm.reward_model_url", "--remote_rm_url": "rm.rm_url",
    "--save_path": "run.output_dir", "--ckpt_path": "run.output_dir", "--prompt_data": "data.prompt_data",
    "--input_key": "data.input_key", "--label_key": "data.label_key", "--apply_chat_template": "data.apply_chat_template",
    "--rollout_batch_size": "rollout.rollout_batch_size", "--n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "--train_batch_size": "train.global_batch_size", "--prompt_max_len": "data.rollout_max_prompt_len",
    "--generate_max_len": "rollout.rollout_max_response_len", "--temperature": "rollout.rollout_temperature",
    "--top_p": "rollout.rollout_top_p", "--actor_learning_rate": "train.lr", "--critic_learning_rate": "roles.critic_lr",
    "--l2": "train.weight_decay", "--max_norm": "train.clip_grad", "--advantage_estimator": "algorithm.advantage_estimator",
    "--init_kl_coef": "algos.kl_coef", "--kl_target": "algos.kl_target", "--kl_horizon": "algos.kl_horizon",
    "--use_kl_loss": "algos.use_kl_loss", "--kl_estimator": "algos.kl_loss_type", "--eps_clip": "algos.eps_clip",
    "--value_clip": "algos.value_clip", "--lambd": "algos.lambd", "--gamma": "algos.gamma", "--dynamic_filtering":
    "rollout.dynamic_sampling_filter_path", "--num_episodes": "run.num_epoch", "--actor_num_nodes": "cluster.actor_num_nodes",
    "--actor_num_gpus_per_node": "cluster.actor_num_gpus_per_node", "--colocate_all_models": "cluster.colocate",
    "--critic_num_nodes": "cluster.critic_num_nodes", "--critic_num_gpus_per_node": "cluster.critic_num_gpus_per_node",
    "--ref_num_nodes": "cluster.ref_num_nodes", "--ref_num_gpus_per_node": "cluster.ref_num_gpus_per_node",
    "--vllm_num_engines": "fleet.rollout_num_gpus", "--vllm_tensor_parallel_size": "fleet.rollout_num_gpus_per_engine",
    "--vllm_gpu_memory_utilization": "sglang.server_args", "--save_steps": "checkpoint.save_interval", "--eval_steps":
    "eval.eval_interval", "--gradient_checkpointing": "megatron.recompute_granularity", "--use_wandb": "run.use_wandb",
    "--async_train": "run.loop", "--partial_rollout": "rollout.partial_rollout", "--enable_vllm_is_correction": "algos.use_tis",
    "--packing_samples": "train.max_tokens_per_gpu", "--lora_rank": "lora.rank", "--lora_alpha": "lora.alpha",
}  # fmt: skip
