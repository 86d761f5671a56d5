"""The names of all flags that the reference system adds to Megatron's and SGLang's, by its own groups.

Source: slime/utils/arguments.py and the arguments of its SGLang and teacher servers.
"""

from __future__ import annotations

from collections.abc import Mapping


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Group -> flags, dashes as underscores.
NAMES: Mapping[str, tuple[str, ...]] = {
    "Modes": _words("train_backend debug_rollout_only debug_train_only load_debug_rollout_data"),
    "Cluster": _words(
        "actor_num_nodes actor_num_gpus_per_node rollout_num_gpus rollout_num_gpus_per_engine num_gpus_per_node colocate offload "
        "offload_train offload_rollout distributed_backend distributed_timeout_minutes"
    ),
    "Training runtime": _words(
        "qwen_gdn_backend train_env_vars custom_model_provider_path recompute_loss_function log_probs_chunk_size "
        "only_train_params_name_list freeze_params_name_list freeze_indexer allgather_cp release_train padded_vocab_size "
        "custom_config_path"
    ),
    "Weight updates": _words(
        "update_weight_mode update_weight_transport update_weight_disk_dir update_weight_disk_keep_files "
        "update_weight_delta_encoding update_weight_delta_checksum update_weight_local_checkpoint_dir "
        "custom_update_weight_post_write_path update_weight_buffer_size update_weights_interval keep_old_actor "
        "check_weight_update_equal"
    ),
    "Rollout": _words(
        "hf_checkpoint model_name rollout_function_path custom_generate_function_path rollout_sample_hook_path rollout_temperature "
        "rollout_top_p rollout_top_k rollout_max_context_len rollout_max_prompt_len rollout_max_response_len "
        "rollout_skip_special_tokens rollout_stop rollout_stop_token_ids rollout_shuffle rollout_seed over_sampling_batch_size "
        "dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout buffer_filter_path "
        "rollout_sample_filter_path rollout_all_samples_process_path rollout_data_postprocess_path rollout_data_transport "
        "rollout_external_engine_addrs custom_rollout_log_function_path custom_eval_rollout_log_function_path"
    ),
    "Fault tolerance": _words(
        "use_fault_tolerance rollout_health_check_interval rollout_health_check_timeout rollout_health_check_first_wait"
    ),
    "Data": _words(
        "num_rollout num_epoch disable_rollout_global_dataset data_source_path prompt_data apply_chat_template "
        "apply_chat_template_kwargs input_key label_key metadata_key tool_key multimodal_keys start_rollout_id rollout_batch_size "
        "n_samples_per_prompt global_batch_size num_steps_per_rollout micro_batch_size balance_data balance_by_flops "
        "use_dynamic_batch_size max_tokens_per_gpu log_probs_max_tokens_per_gpu data_pad_size_multiplier loss_mask_type"
    ),
    "Evaluation": _words(
        "eval_function_path eval_interval eval_prompt_data eval_config skip_eval_before_train eval_input_key eval_label_key "
        "eval_tool_key n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len "
        "eval_min_new_tokens eval_max_context_len"
    ),
    "Algorithm": _words(
        "ref_load ref_ckpt_step load save save_interval async_save no_save_optim save_hf seed clip_grad lr "
        "calculate_per_token_loss advantage_estimator custom_advantage_function_path disable_compute_advantages_and_returns "
        "loss_type custom_loss_function_path eps_clip eps_clip_high eps_clip_c value_clip kl_coef use_kl_loss kl_loss_coef "
        "kl_loss_type use_unbiased_kl ref_update_interval entropy_coef gamma lambd normalize_advantages "
        "disable_grpo_std_normalization disable_rewards_normalization use_rollout_entropy get_mismatch_metrics "
        "use_rollout_logprobs use_tis tis_clip tis_clip_low custom_tis_function_path custom_pg_loss_reducer_function_path "
        "use_routing_replay use_rollout_routing_replay use_opsm opsm_delta reset_optimizer_states use_stateless_adam "
        "num_critic_only_steps megatron_config_path"
    ),
    "On-policy distillation": _words("use_opd opd_type opd_kl_coef opd_teacher_load opd_teacher_ckpt_step"),
    "Multi-token prediction": _words("mtp_num_layers mtp_loss_scaling_factor enable_mtp_training"),
    "Reward": _words(
        "rm_type rm_url reward_key eval_reward_key group_rm custom_rm_path custom_reward_post_process_path "
        "custom_convert_samples_to_train_data_path"
    ),
    "Rollout buffer": _words(
        "rollout_buffer_url fetch_trajectory_retry_times min_batch_collection_ratio rollout_task_type"
    ),
    "Weights & Biases": _words(
        "use_wandb wandb_mode wandb_dir wandb_key wandb_host wandb_team wandb_group wandb_project disable_wandb_random_suffix "
        "wandb_run_id wandb_always_use_train_step log_multi_turn log_passrate log_reward_category log_correct_samples"
    ),
    "TensorBoard": _words("use_tensorboard tb_project_name tb_experiment_name"),
    "Debugging and profiling": _words(
        "save_debug_rollout_data load_forge_rollout_data load_debug_rollout_data_subsample save_debug_train_data dump_details "
        "memory_snapshot_dir memory_snapshot_num_steps profile_target memory_recorder record_memory_history"
    ),
    "Network": _words("http_proxy use_distributed_post"),
    "Megatron hooks": _words(
        "custom_megatron_init_path custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path "
        "megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers "
        "megatron_deepgemm_moe_forward_modules"
    ),
    "Continuous integration": _words(
        "ci_test ci_disable_kl_checker ci_train_rollout_logprob_abs_diff_threshold ci_save_grad_norm ci_load_grad_norm"
    ),
    "SGLang": _words(
        "sglang_server_concurrency sglang_router_ip sglang_router_port sglang_router_request_timeout_secs prefill_num_servers "
        "sglang_config"
    ),
    "Teacher server": _words(
        "teacher_port teacher_warmup_port teacher_warmup_timeout_s teacher_sample_reduction_chunk_size "
        "teacher_label_reduction_chunk_size megatron_server_max_length megatron_server_update_timeout_s megatron_server_warmup"
    ),
}
