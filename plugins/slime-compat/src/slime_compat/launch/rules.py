"""Flags of the reference system that become other settings: a function for each, over the script and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_core.files.strict_read import read_text

from slime_compat.flags.megatrons import MEGATRONS
from slime_compat.flags.theirs import THEIRS
from slime_compat.launch.layout import engines, layout, schedule
from slime_compat.launch.made import Made
from slime_compat.launch.places import folders, quantized_servers

#: The reference's own functions and classes by their references -> slime's by name; None is the default.
_OWN: Mapping[str, Mapping[str, str | None]] = {
    "rollout_function_path": {
        "slime.rollout.sglang_rollout.generate_rollout": None,
        "slime.rollout.sft_rollout.generate_rollout": "sft",
    },
    "eval_function_path": {"slime.rollout.sglang_rollout.generate_rollout": None},
    "data_source_path": {
        "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
        "slime.rollout.data_source.RolloutDataSource": None,
    },
    "buffer_filter_path": {"slime.rollout.data_source.pop_first": None},
    "dynamic_sampling_filter_path": {
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "nonzero-std"
    },
}
#: Rollout functions of the reference's examples that never stop generating.
_FULLY_ASYNC = (
    "fully_async_rollout.generate_rollout_fully_async",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
#: Arguments that the patch of the reference's Megatron has, or that only its training script reads.
MODEL_ARGUMENTS = ("spec", "mscale", "mscale_all_dim", "post_self_attn_layernorm", "post_mlp_layernorm")
#: Keys of evaluation's sampling -> the rollout's, from which they are inherited.
_INHERITED = {
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    "eval_max_response_len": "rollout_max_response_len",
}
#: Flags of one value that rules take out of a script, or count with: what is left is held against its own type by slime.
_ONE_VALUE = ("save", "load", "ref_load", "opd_teacher_load", "dump_details", "micro_batch_size")
_ONE_NUMBER = (
    "ckpt_step",
    "ref_ckpt_step",
    "opd_teacher_ckpt_step",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
)
_NUMBERS: Mapping[str, Callable[[str], float]] = {
    "rollout_temperature": float,
    "rollout_top_p": float,
    "rollout_top_k": int,
    "rollout_max_response_len": int,
}


def one_value(made: Made) -> None:
    """Refuse flags without their one value, as of a variable of the script that is empty, or with another than a number."""
    for flag in (*_ONE_VALUE, *_ONE_NUMBER):
        words = made.script.flags.get(flag)
        is_number = flag in _ONE_NUMBER
        if words is None or (len(words) == 1 and (words[0].isdecimal() or not is_number)):
            continue
        made.script.take(flag)
        made.refuse(flag, " ".join(words) or "no value", "one whole number" if is_number else "one value")


def own_functions(made: Made) -> None:
    """Replace the reference's own functions by slime's."""
    script = made.script
    for flag, known in _OWN.items():
        given = (script.value(flag) or "").replace(":", ".")
        if given in known:
            ours = known[given]
            script.flags.pop(flag)
            if ours is not None:
                script.flags[flag] = [ours]
            made.note(flag, f"{given} is slime's {'own default' if ours is None else ours!r}")
    if (script.value("rollout_function_path") or "").replace(":", ".") in _FULLY_ASYNC:
        script.flags.pop("rollout_function_path")
        made.put("run", "loop", "fully-async")
        made.note("rollout_function_path", "the loop fully-async")
        if script.has("partial_rollout") and script.has("mask_offpolicy_in_partial_rollout"):
            made.put("train", "update_weights_in_flight", "continue")
            made.note(
                "mask_offpolicy_in_partial_rollout", "--update-weights-in-flight continue: there it masks"
            )


def evaluation(made: Made) -> None:
    """Have evaluations sample as the rollout does, where they have no flag of their own."""
    for own, rollout in _INHERITED.items():
        value = made.script.value(rollout)
        if not made.script.has(own) and value is not None:
            try:
                made.put("eval", own, _NUMBERS[rollout](value))
            except ValueError:
                continue  # the rollout's own flag is refused
        elif own == "eval_temperature" and not made.script.has(own):
            made.put("eval", own, 1.0)


def micro_batches(made: Made) -> None:
    """Turn samples per micro-batch into tokens."""
    script = made.script
    dynamic, size = script.take("use_dynamic_batch_size") is not None, script.take("micro_batch_size")
    if dynamic:
        made.note("use_dynamic_batch_size", "micro-batches are always packed, up to --max-tokens-per-gpu")
        if size is not None:
            made.note("micro_batch_size", "nothing beside --use-dynamic-batch-size, as in the reference")
        if not script.has("max_tokens_per_gpu"):
            made.refuse("use_dynamic_batch_size", "it without --max-tokens-per-gpu", "both")
        return
    text = size[0] if size else "1"
    if not text.isdecimal() or not int(text):
        made.refuse("micro_batch_size", text, "a number of samples, 1 or more")
        return
    longest = script.value("rollout_max_context_len") or script.value("rollout_max_response_len") or "0"
    count = int(text)
    tokens = 1 if count == 1 else count * int(longest) if longest.isdecimal() else 0
    if script.take("max_tokens_per_gpu") is not None:
        made.note("max_tokens_per_gpu", "nothing without --use-dynamic-batch-size, as in the reference")
    if tokens:
        made.put("train", "max_tokens_per_gpu", tokens)
    made.note(
        "micro_batch_size",
        f"--max-tokens-per-gpu {tokens}: {'every sample is a micro-batch' if count == 1 else f'{count} of the longest'}; "
        "how a step is cut changes no gradient here",
    )


def devices(made: Made) -> None:
    """Say who gets which GPUs."""
    script = made.script
    if script.take("offload") is not None:
        made.put("cluster", "offload_train", True)
        made.put("cluster", "offload_rollout", True)
        made.note("offload", "--offload-train --offload-rollout")
    if script.has("colocate") and script.take("rollout_num_gpus") is not None:
        made.note("rollout_num_gpus", "the trainer's GPUs, by --colocate, as in the reference")
    if script.value("advantage_estimator") != "ppo" and not script.has("custom_advantage_function_path"):
        for name in ("critic_num_nodes", "critic_num_gpus_per_node"):
            if script.take(name) is not None:
                made.note(name, "nothing: the estimator has no critic, as in the reference")
    if script.value("update_weight_transport") == "nccl":
        script.flags.pop("update_weight_transport")
        made.note("update_weight_transport", "nccl: what engine and trainer both have is taken")
    if script.has("rollout_external_engine_addrs") and not script.has("update_weight_transport"):
        made.put("train", "update_weight_transport", "disk")
        made.note(
            "update_weight_transport",
            "disk: it reaches engines on every machine that sees the run's folder (--save); faster, where the machines reach this one: "
            "--update-weight-transport nccl",
        )
    if script.value("log_probs_chunk_size") == "-1":
        script.flags.pop("log_probs_chunk_size")
        made.note("log_probs_chunk_size", "-1: slime's own default, by which the results are the same")
    if script.take("balance_by_flops") is not None:
        script.flags["balance_data"] = []
        made.note("balance_by_flops", "--balance-data, which weighs by floating point operations")


def losses(made: Made) -> None:
    """Say which loss: most follow from the estimator."""
    script = made.script
    loss = script.value("loss_type")
    if loss in ("policy_loss", "custom_loss"):
        script.flags.pop("loss_type")
        what = "--custom-loss-function-path" if loss == "custom_loss" else "the estimator's own"
        if loss == "custom_loss" and not script.has("custom_loss_function_path"):
            made.refuse("loss_type", "custom_loss", "--custom-loss-function-path beside it")
        made.note("loss_type", f"{loss}: {what}")
    if script.take("disable_compute_advantages_and_returns") is not None:
        if loss != "sft_loss":
            made.refuse(
                "disable_compute_advantages_and_returns",
                "it without --loss-type sft_loss",
                "advantages: every other loss here reads them",
                "give --custom-advantage-function-path with a function that returns zeros",
            )
        made.note("disable_compute_advantages_and_returns", "the loss sft_loss reads none")
    kind = script.take("opd_type")
    if kind is not None:
        if kind == ["megatron"] and not script.has("opd_teacher_load"):
            made.refuse("opd_type", "megatron without --opd-teacher-load", "the teacher's folder")
        elif kind not in (["megatron"], ["sglang"]):
            made.refuse("opd_type", " ".join(kind), "megatron or sglang")
        made.note(
            "opd_type",
            f"{' '.join(kind)}: the teacher is --opd-teacher-load, or samples carry teacher_log_probs (a reward function may set them)",
        )
    if script.has("mtp_num_layers") and not script.has("enable_mtp_training"):
        script.flags.pop("mtp_num_layers")
        made.note("mtp_num_layers", "these layers are passed on unchanged without --enable-mtp-training")


def keys(made: Made) -> None:
    """Keep secrets out of settings."""
    if (words := made.script.take("wandb_key")) is not None:
        if words and words[0]:
            made.environment["WANDB_API_KEY"] = words[0]
        made.note("wandb_key", "the variable WANDB_API_KEY of this run")


def model_arguments(made: Made) -> None:
    """Hand arguments on that are held against config.json."""
    given: dict[str, Any] = {}
    for name in MODEL_ARGUMENTS:
        if (words := made.script.take(name)) is not None:
            given[name] = True if not words else words[0] if len(words) == 1 else words
    if given:
        made.put("compat", "model_args", given)
        made.notes += [f"--{name.replace('_', '-')}: held against the model's config.json" for name in given]


def custom_config(made: Made) -> None:
    """Read the YAML file whose keys take the place of arguments."""
    words = made.script.take("custom_config_path")
    if words is None:
        return
    if len(words) != 1:
        made.refuse("custom_config_path", " ".join(words) or "no value", "one value")
        return
    import yaml

    path = Path(words[0])
    try:
        given = yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        made.refuse(
            "custom_config_path", f"{path} ({' '.join(str(error).split())})", "a YAML file that can be read"
        )
        return
    if not isinstance(given, dict):
        made.refuse("custom_config_path", f"{path}: {type(given).__name__}", "a table of keys and values")
        return
    table = {str(key): value for key, value in given.items()}
    flags = [key for key in table if made.known(key) or key in THEIRS or key in MEGATRONS]
    for key in flags:
        made.script.take(key)
        made.script.take(f"no_{key}")
        if table[key] is not False:
            made.script.flags[key] = _as_words(table[key])
        elif key not in THEIRS and key not in MEGATRONS and made.known(f"no_{key}"):
            made.script.flags[f"no_{key}"] = []  # which may be on where nothing is said
    if others := {key: value for key, value in table.items() if key not in flags}:
        made.put("compat", "custom_config", others)
    made.note(
        "custom_config_path",
        f"as flags {', '.join(flags) or 'none'}; for hooks {', '.join(others) or 'none'}",
    )


def _as_words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, list):
        return [str(each) for each in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


#: In this order: a file of arguments comes before what reads them.
RULES: tuple[Callable[[Made], None], ...] = (
    own_functions,
    schedule,
    layout,
    engines,
    evaluation,
    micro_batches,
    devices,
    losses,
    keys,
    model_arguments,
    folders,
    quantized_servers,
)
#: Flags that are mapped by these functions, not by `Fate.to`.
DEALT_WITH = frozenset({
    *_OWN, *MODEL_ARGUMENTS, "custom_config_path", "use_dynamic_batch_size", "micro_batch_size", "offload", "rollout_num_gpus",
    "update_weight_transport", "log_probs_chunk_size", "balance_by_flops", "loss_type", "disable_compute_advantages_and_returns",
    "opd_type", "mtp_num_layers", "wandb_key", "save", "load", "ref_load", "ref_ckpt_step", "ckpt_step", "opd_teacher_ckpt_step",
    "lr_warmup_fraction", "sglang_enable_ep_moe", "sglang_enable_deepep_moe", "debug_rollout_only", "debug_train_only",
    "load_debug_rollout_data", "save_debug_rollout_data", "dump_details",
})  # fmt: skip
