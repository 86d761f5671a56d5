"""Megatron's own flags: their names without importing Megatron, and their values by Megatron's own parser.

`megatron_flags.json` holds, for every flag of the megatron-core release that this package is written for, the
configurations that it reaches: `transformer`, `optimizer`, `ddp`. Made by `scripts/megatron_flags.py`; a test
compares it with what is installed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from typing import Any, NoReturn

from slime_core.errors import Problem, TrainerError

from slime_megatron.settings.model_flags import DESCRIBED

#: Fields that are one value or a list; the parser makes lists, and Megatron's training script takes the only one out.
_ALSO_ONE = frozenset({"moe_router_load_balancing_type", "moe_aux_loss_coeff"})
#: The parser's name of a value -> the field that it becomes, where Megatron's training script renames it.
FIELDS = {"ddp_bucket_size": "bucket_size"}
_NO_VIRTUAL = (
    "pipeline stages of consecutive layers: with micro-batches of several lengths, Megatron's interleaved schedule takes "
    "one message's length for another's where two ranks send both ways",
    "use --pipeline-model-parallel-size alone",
)
_NO_MTP = (
    "the multi-token prediction (MTP) layers of the model's folder, one for each depth",
    "use --enable-mtp-training alone",
)
_OWN_ATTENTION = (
    "nothing: attention over packed rows and its rotary embedding are slime's own; softmax is always in float32, and the kernel "
    "follows from the device",
    "drop the flag",
)
_NO_TE_GROUPS = (
    "moe_grouped_gemm, which is what experts do: others of Megatron's grouped products are TransformerEngine's",
    "drop the flag",
)
_WHOLE_AFTER_A_STEP = (
    "weights that each rank has whole when an optimizer step ends: then they are sent to the engine, saved, and swapped for "
    "those of other roles",
    "drop the flag",
)
#: Flag that is not followed -> what is wanted in its place, and what to do.
_REFUSED = {
    "num_layers_per_virtual_pipeline_stage": _NO_VIRTUAL,
    "num_virtual_stages_per_pipeline_rank": _NO_VIRTUAL,
    "deterministic_mode": (
        "nothing: what it asks of NCCL, cuBLAS and torch, Megatron's own training script sets before CUDA is used, and slime does not",
        "drop the flag",
    ),
    "mtp_detach_heads": _NO_MTP,
    "mtp_loss_scaling_factor": ("slime's setting of that name", "give megatron.mtp_loss_scaling_factor"),
    "mtp_hybrid_override_pattern": _NO_MTP,
    "mtp_standalone": _NO_MTP,
    "mtp_use_repeated_layer": _NO_MTP,
    **dict.fromkeys(
        ("overlap_param_gather", "overlap_param_gather_with_optimizer_step", "use_megatron_fsdp"),
        _WHOLE_AFTER_A_STEP,
    ),
    **dict.fromkeys(
        (
            *(
                "attention_backend",
                "attention_softmax_in_fp32",
                "apply_query_key_layer_scaling",
                "cp_comm_type",
            ),
            *(
                "experimental_attention_variant",
                "flash_attention_version",
                "flash_decode",
                "kitchen_attention_backend",
            ),
            *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "log_max_attention_logit"),
            *("mrope_section", "multi_latent_attention", "no_rope_freq"),
            *("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "softmax_type"),
            *("use_kitchen_attention", "window_attn_skip_freq"),
        ),
        _OWN_ATTENTION,
    ),
    **dict.fromkeys(
        (
            *("moe_single_grouped_bias", "moe_single_grouped_weight"),
            *("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
        ),
        _NO_TE_GROUPS,
    ),
}
#: Flag, dashes as underscores -> the configurations that it reaches.
Reach = Mapping[str, tuple[str, ...]]


@functools.cache
def known_flags() -> Reach:
    """Return all flags of Megatron."""
    text = (files("slime_megatron.settings") / "megatron_flags.json").read_text(encoding="utf-8")
    return {name: tuple(reached) for name, reached in json.loads(text).items()}


def refused() -> frozenset[str]:
    """Return the flags of Megatron that `problems` refuses whatever their value."""
    idle = frozenset(name for name, reached in known_flags().items() if not reached)
    return (idle | _REFUSED.keys()) - DESCRIBED.keys()


def problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with flags, as far as it can be known without Megatron and the model."""
    known = known_flags()
    for name, value in given.items():
        if name in DESCRIBED:
            continue  # held against config.json, when it is known
        if name in _REFUSED:
            yield Problem(f"megatron.megatron_args.{name}", str(value), *_REFUSED[name])
        elif name not in known:
            yield Problem(
                f"megatron.megatron_args.{name}", "no flag of Megatron", "one that megatron-core has"
            )
        elif not known[name]:
            yield Problem(
                f"megatron.megatron_args.{name}",
                "a flag of Megatron's own training script",
                "one that reaches Megatron's model, optimizer or gradient buffers: slime has its own loop",
                "look for a setting of slime by `slime config flags`",
            )


def with_flags[T](
    ours: functools.partial[T], given: Mapping[str, Any], reach: str, *, defaults: Collection[str] = ()
) -> T:
    """Return one of Megatron's configurations: with our values, and with those of the flags that reach it.

    Args:
        ours: the configuration's class, and what follows from slime's settings and the model.
        given: flag -> value, as text.
        reach: `transformer`, `optimizer` or `ddp`.
        defaults: fields of ours that a flag may change.

    Raises:
        TrainerError: Megatron's parser refuses a value, or a flag contradicts what slime derives; names both.
    """
    theirs = parsed({name: value for name, value in given.items() if reach in known_flags().get(name, ())})
    for field, (flag, value) in theirs.items():
        own = ours.keywords.get(field, value)
        if field not in defaults and own != value:
            raise TrainerError(
                f"{flag} makes Megatron's {field} {value!r}, and slime derives {own!r} from its own settings and "
                "the model's config.json; drop the flag, or change the setting that it follows from"
            )
    return ours(**{field: value for field, (_, value) in theirs.items()})


def parsed(given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return Megatron's field -> (flag, typed value), by Megatron's own parser. Imports Megatron if there are any.

    Raises:
        TrainerError: the parser refuses one; says why.
    """
    if not given:
        return {}
    parser = megatron_parser()
    found: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is False:  # of a recipe: what the flag would turn on is off
            action = parser._option_string_actions[flag]
            if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
                found[FIELDS.get(action.dest, action.dest)] = (f"{flag} false", not action.const)
            continue
        words = [] if value is True else [str(v) for v in (value if isinstance(value, list) else [value])]
        action = parser._option_string_actions[flag]
        parsed_value = getattr(parser.parse_args([flag, *words]), action.dest)
        if action.dest in _ALSO_ONE and len(parsed_value) == 1:
            parsed_value = parsed_value[0]
        found[FIELDS.get(action.dest, action.dest)] = (flag, parsed_value)
    return found


def megatron_parser() -> argparse.ArgumentParser:
    """Return Megatron's own parser; it raises TrainerError where argparse would end the process."""
    from slime_megatron.importing import importing

    with importing():
        from megatron.training.arguments import add_megatron_arguments
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainerError(f"Megatron's parser: {message}")
