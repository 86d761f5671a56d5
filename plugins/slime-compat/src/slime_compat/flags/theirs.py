"""The fates of the reference system's flags (`flags.names`) that are not simply slime's own.

A flag of `flags.names` that is not here is slime's own, of the same name and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_compat.flags.fate import Fate, follows, mapped, refused

_BUFFER = (
    "slime has no server that collects trajectories",
    "a rollout function (--rollout-function-path) or a data source (--data-source-path) that asks yours",
)
_DEEPGEMM = (
    "Megatron's own linear layers are used",
    "float8 by --fp8-format with --transformer-impl transformer_engine",
)
_TEACHER = (
    "the teacher of on-policy distillation is in the trainer, where it needs no server",
    "--opd-teacher-load FOLDER",
)
_PROFILE = ("slime starts no profiler of torch", "events.jsonl of the run, by slime trace; or nsys")

#: Flag, dashes as underscores -> what becomes of it.
THEIRS: Mapping[str, Fate] = {
    "debug_rollout_only": mapped("trainer `none`: steps generate and score, and nothing is trained"),
    "debug_train_only": mapped("engine `none`; samples come from --load-debug-rollout-data"),
    "load_debug_rollout_data": mapped("the rollout function `recorded` of that file, and engine `none`"),
    "save_debug_rollout_data": mapped(
        "a file of each step's samples, with {rollout_id} in its name, beside the run's own records"
    ),
    "dump_details": mapped("--save-debug-rollout-data DIR/rollout_data/{rollout_id}.pt"),
    "save_debug_train_data": refused(
        "what the trainer makes of samples is not written",
        "--rollout-data-postprocess-path, which sees it on every rank",
    ),
    "load_forge_rollout_data": refused("that format is the reference's own", "--load-debug-rollout-data"),
    "load_debug_rollout_data_subsample": refused(
        "a part of a step would be weighted as the whole",
        "a file of fewer samples, and --rollout-batch-size of as many groups",
    ),
    "actor_num_gpus_per_node": mapped("itself; 8 when not given", to="actor_num_gpus_per_node"),
    "num_gpus_per_node": mapped("itself; 8 when not given", to="num_gpus_per_node"),
    "rollout_num_gpus": mapped("itself; under --colocate the trainer's GPUs, whatever it says"),
    "offload": mapped("--offload-train and --offload-rollout"),
    "distributed_backend": follows("it is NCCL on GPUs and gloo on a CPU", "nccl", "gloo"),
    "distributed_timeout_minutes": follows(
        "collectives are within a step, whose deadline is --train-timeout-s"
    ),
    "qwen_gdn_backend": follows("how gated delta nets are computed follows from the device"),
    "recompute_loss_function": follows(
        "logits of a response beyond --log-probs-chunk-size tokens are always computed again"
    ),
    "log_probs_chunk_size": mapped("itself; -1, all at once, is slime's own default"),
    "freeze_indexer": follows("indexers of sparse attention are never trained here"),
    "allgather_cp": refused(
        "sparse attention has no context parallelism here",
        "--context-parallel-size 1, with which the flag is fine",
    ),
    "release_train": refused(
        "ranks live as long as the run", "--offload-train, which moves their state to the host"
    ),
    "padded_vocab_size": follows(
        "the vocabulary is padded to what tensor parallelism needs, and checkpoints hold it unpadded"
    ),
    "custom_config_path": mapped(
        "each key of the YAML file as a flag; others are there for hooks, as `args.KEY`"
    ),
    "update_weight_transport": mapped(
        "`disk`; for `nccl` slime's own choice of what engine and trainer both have"
    ),
    "update_weight_delta_checksum": follows(
        "every tensor that arrives is compared with a fingerprint of what was sent"
    ),
    "update_weight_local_checkpoint_dir": follows(
        "changes are applied to the engine's own weights, which needs no copy on a disk"
    ),
    "check_weight_update_equal": follows("every update is compared, with or without"),
    "rollout_function_path": mapped("itself; the reference's own functions are slime's rollouts"),
    "data_source_path": mapped("itself; the reference's own sources are slime's source of files"),
    "buffer_filter_path": mapped("itself; `pop_first` is the default"),
    "dynamic_sampling_filter_path": mapped("itself; `check_reward_nonzero_std` is the filter `nonzero-std`"),
    "eval_function_path": mapped("itself; the reference's own function is slime's evaluation"),
    "rollout_data_transport": follows("batches are shared memory of the ranks of a machine", "object-store"),
    "start_rollout_id": refused("a run goes on where its checkpoint stands", "--load, or nothing"),
    "micro_batch_size": mapped("--max-tokens-per-gpu of as many samples: one each, or N times the longest"),
    "use_dynamic_batch_size": mapped("--max-tokens-per-gpu, by which micro-batches are always packed"),
    "balance_by_flops": mapped("--balance-data, which always weighs by floating point operations"),
    "log_probs_max_tokens_per_gpu": follows("the reference sets it, and reads it nowhere"),
    "data_pad_size_multiplier": follows("packed rows are as long as their samples"),
    "save": mapped(
        "the run's folder: --output-dir and --run-name. Without it only the reference's default place, `runs`"
    ),
    "load": mapped(
        "the run that goes on by itself, if it is the folder of --save; else another run's folder, a Megatron folder (torch_dist), "
        "or a Hugging Face folder; where nothing is there, --ref-load"
    ),
    "ref_load": mapped(
        "itself, also of a Megatron folder (torch_dist), from which the policy starts, too, where --load has nothing"
    ),
    "ref_ckpt_step": mapped("the folder of that iteration in --ref-load"),
    "ckpt_step": mapped("the folder of that iteration in --load"),
    "save_interval": mapped("itself, where --save is given", to="save_interval"),
    "no_save_optim": follows(
        "a run could not go on from such a checkpoint, so that checkpoints hold the optimizer; --save-hf writes weights alone"
    ),
    "loss_type": mapped(
        "`sft_loss`; the others follow from the estimator, or from --custom-loss-function-path"
    ),
    "disable_compute_advantages_and_returns": mapped(
        "nothing with --loss-type sft_loss, which reads none; refused without"
    ),
    "use_rollout_entropy": refused(
        "entropy is measured in the optimizer steps", "--entropy-coef, with train/entropy_loss"
    ),
    "get_mismatch_metrics": follows(
        "how far log-probs of trainer and engine differ is always measured, of the worst sample, too"
    ),
    "reset_optimizer_states": refused(
        "the optimizer goes on from step to step", "--optimizer sgd --sgd-momentum 0 has no state"
    ),
    "use_stateless_adam": refused("Megatron has no such optimizer", "--optimizer sgd"),
    "megatron_config_path": refused(
        "roles have settings of their own", "--critic-lr, --critic-load and their like"
    ),
    "opd_type": mapped(
        "`megatron`: the teacher of --opd-teacher-load; `sglang` only where samples carry its log-probs"
    ),
    "opd_teacher_ckpt_step": mapped("the folder of that iteration in --opd-teacher-load"),
    "mtp_num_layers": mapped("--enable-mtp-training and the number, which must be the model's"),
    **dict.fromkeys(
        (
            "rollout_buffer_url",
            "fetch_trajectory_retry_times",
            "min_batch_collection_ratio",
            "rollout_task_type",
        ),
        refused(*_BUFFER),
    ),
    "wandb_key": mapped("the variable WANDB_API_KEY of the run; no file holds it"),
    "disable_wandb_random_suffix": follows("names of runs get no suffix"),
    "wandb_always_use_train_step": follows("all metrics of a step are logged at its number"),
    "log_multi_turn": follows("turns of multi-turn samples are always measured"),
    "log_passrate": follows("pass@k is always reported, of training and of evaluations"),
    "log_reward_category": mapped(
        "--compat-log-reward-category, by which shares of each kind are metrics",
        to="compat_log_reward_category",
    ),
    "log_correct_samples": follows("correct samples are told apart in the run's records: slime samples"),
    "memory_snapshot_dir": refused(*_PROFILE),
    "memory_snapshot_num_steps": refused(*_PROFILE),
    "profile_target": refused(*_PROFILE),
    "memory_recorder": refused(*_PROFILE),
    "record_memory_history": refused(*_PROFILE),
    "http_proxy": follows("the reference sets it, and reads it nowhere"),
    "use_distributed_post": follows("one process sends all requests, and waits for none"),
    **dict.fromkeys(
        (
            "megatron_deepgemm_forward_layers",
            "megatron_deepgemm_forward_modules",
            "megatron_deepgemm_moe_forward_layers",
            "megatron_deepgemm_moe_forward_modules",
        ),
        refused(*_DEEPGEMM),
    ),
    "ci_test": refused("slime has tests of its own", "scripts/test"),
    "ci_disable_kl_checker": refused("slime has tests of its own", "scripts/test"),
    "ci_train_rollout_logprob_abs_diff_threshold": mapped("--logprob-diff-limit", to="logprob_diff_limit"),
    "ci_save_grad_norm": refused("metrics of every step are in the run's folder", "slime diff RUN RUN"),
    "ci_load_grad_norm": refused("metrics of every step are in the run's folder", "slime diff RUN RUN"),
    "sglang_router_request_timeout_secs": mapped("--sglang-request-timeout-s", to="sglang_request_timeout_s"),
    **dict.fromkeys(
        (
            "teacher_port",
            "teacher_warmup_port",
            "teacher_warmup_timeout_s",
            "teacher_sample_reduction_chunk_size",
            "teacher_label_reduction_chunk_size",
            "megatron_server_max_length",
            "megatron_server_update_timeout_s",
            "megatron_server_warmup",
        ),
        refused(*_TEACHER),
    ),
}
