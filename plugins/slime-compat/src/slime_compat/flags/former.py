"""The fates of flags that the reference system has had, and that older scripts give."""

from __future__ import annotations

from collections.abc import Mapping

from slime_compat.flags.fate import Fate, follows, mapped, refused

_ROUTER = "requests are balanced between servers with or without, and servers that are lost replaced"
_FSDP = ("there is no FSDP trainer", "the trainer megatron")

#: Flag, dashes as underscores -> what becomes of it.
FORMER: Mapping[str, Fate] = {
    "use_slime_router": follows(_ROUTER),
    "slime_router_timeout": follows(_ROUTER),
    "slime_router_max_connections": follows(_ROUTER),
    "slime_router_health_check_failure_threshold": follows(_ROUTER),
    "slime_router_middleware_paths": refused(
        "requests pass no middleware", "--custom-generate-function-path, which sees each of them"
    ),
    "sglang_router_policy": mapped("--router-policy", to="router_policy"),
    "qkv_format": follows(
        "whether samples are packed into rows changes no result; here they are", "thd", "bshd"
    ),
    "megatron_to_hf_mode": follows("weights are converted by the model's family", "raw", "bridge"),
    "train_memory_margin_bytes": follows(
        "what the trainer leaves free of a shared GPU is what the engine gives up: --sglang-mem-fraction-static"
    ),
    "critic_num_nodes": mapped(
        "itself; beside an estimator without a critic nothing comes of it", to="critic_num_nodes"
    ),
    "critic_num_gpus_per_node": mapped(
        "itself; beside an estimator without a critic nothing comes of it", to="critic_num_gpus_per_node"
    ),
    "critic_save": follows("a checkpoint of the run holds the critic, too"),
    "prompt_key": mapped("--input-key", to="input_key"),
    "rollout_generate_func_path": mapped(
        "--custom-generate-function-path", to="custom_generate_function_path"
    ),
    "reward_fn_path": mapped("--custom-rm-path", to="custom_rm_path"),
    "attn_implementation": refused(*_FSDP),
    "gradient_checkpointing": refused("there is no FSDP trainer", "--recompute-granularity full"),
    "fsdp_cpu_offload": refused("there is no FSDP trainer", "--optimizer-cpu-offload"),
}
