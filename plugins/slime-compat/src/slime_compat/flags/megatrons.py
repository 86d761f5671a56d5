"""The fates of flags of Megatron and SGLang that the reference's scripts give and slime does not take as they are."""

from __future__ import annotations

from collections.abc import Mapping

from slime_compat.flags.fate import Fate, follows, mapped, refused

_KERNEL = "which kernel computes attention over packed rows follows from the device"
_DATA = "the tokenizer and the prompts are those of --hf-checkpoint and --prompt-data"
_OVERLAP = "what of communication is overlapped changes no number; slime decides it by the layout"
_MODEL = "held against the model's config.json"

#: Flag, dashes as underscores -> what becomes of it.
MEGATRONS: Mapping[str, Fate] = {
    "attention_backend": follows(_KERNEL),
    "attention_softmax_in_fp32": follows("softmax is always in float32"),
    "accumulate_allreduce_grads_in_fp32": follows("gradients are always added up and reduced in float32"),
    "spec": mapped("the model's family, which must be the one that the script's layers are of"),
    **dict.fromkeys(
        ("mscale", "mscale_all_dim", "post_self_attn_layernorm", "post_mlp_layernorm"), mapped(_MODEL)
    ),
    "no_position_embedding": follows("where positions go in follows from the model's config.json"),
    "use_gated_attention": follows("the family says whether attention has an output gate"),
    "rotary_seq_len_interpolation_factor": refused(
        "rotary scaling is the model's own", "rope_scaling in config.json"
    ),
    "enable_experimental": follows("it only allows other flags in Megatron"),
    "check_for_nan_in_loss_and_grad": follows(
        "an optimizer step whose gradient is not finite is always left out, and counted: train/skipped_steps"
    ),
    "seq_length": follows("samples have lengths of their own"),
    "make_vocab_size_divisible_by": follows("the vocabulary is padded to what tensor parallelism needs"),
    "use_mcore_models": follows("Megatron has no others"),
    "use_flash_attn": follows(_KERNEL),
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "dataloader_type"), follows(_DATA)
    ),
    **dict.fromkeys(
        (
            "overlap_grad_reduce",
            "overlap_param_gather",
            "overlap_param_gather_with_optimizer_step",
            "tp_comm_overlap",
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
        ),
        follows(_OVERLAP),
    ),
    **dict.fromkeys(
        (
            "use_dist_ckpt",
            "dist_ckpt_format",
            "ckpt_format",
            "ckpt_fully_parallel_save",
            "ckpt_fully_parallel_load",
            "ckpt_assume_constant_structure",
            "use_persistent_ckpt_worker",
            "dist_ckpt_strictness",
            "auto_detect_ckpt_format",
        ),
        follows("checkpoints are Megatron's distributed ones, written by all ranks"),
    ),
    **dict.fromkeys(
        ("finetune", "no_load_optim"),
        follows(
            "only weights are read of a Megatron folder, and by this of another run; of the run's own checkpoint all of it"
        ),
    ),
    "no_load_rng": follows("of a Megatron folder only weights are read; of a run's own checkpoint all of it"),
    "no_save_rng": refused("a run could not go on exactly from such a checkpoint"),
    "lr_warmup_fraction": mapped("--lr-warmup-iters: the share of the run's optimizer steps"),
    "sglang_enable_ep_moe": mapped(
        "--sglang-ep-size of the whole engine, where it is not given, as SGLang had it"
    ),
    "sglang_enable_deepep_moe": mapped("--sglang-moe-a2a-backend deepep, as SGLang calls it now"),
    "train_iters": follows("the number of steps is that of --num-rollout"),
    "log_interval": follows("every step is logged"),
    "sglang_cuda_graph_bs": mapped(
        "--sglang-cuda-graph-bs-decode, as SGLang calls it now", to="sglang_cuda_graph_bs_decode"
    ),
    "sglang_cuda_graph_max_bs": mapped(
        "--sglang-cuda-graph-max-bs-decode, as SGLang calls it now", to="sglang_cuda_graph_max_bs_decode"
    ),
}
