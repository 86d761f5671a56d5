"""Checks of flags on experts and their routers, against each other and against roles and adapters."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.errors import Problem

from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection

#: What balances experts and is right for packed rows of several sizes.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")

#: Flags under which a router reads which tokens its micro-batch has.
_PER_MICRO_BATCH = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")


def expert_problems(roles: RolesSection, section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    """Yield what cannot be done with experts and routers, whatever the model."""
    yield from _routing_problems(roles, section)
    yield from _shared_expert_problems(section, lora)


def _routing_problems(roles: RolesSection, section: MegatronSection) -> Iterator[Problem]:
    if section.use_routing_replay and roles.keep_old_actor:
        yield Problem(
            "megatron.use_routing_replay",
            "it beside roles.keep_old_actor",
            "one of them: the old actor's passes are under several weights, each with routes of its own",
        )
    flags = section.megatron_args
    kinds, coefficients, modules = (  # one word is no list
        value if isinstance(value, list) else [value]
        for value in (
            flags.get("moe_router_load_balancing_type", "aux_loss"),
            flags.get("moe_aux_loss_coeff", 0.0),
            flags.get("recompute_modules", []),
        )
    )
    for kind in kinds:
        if kind not in _BALANCING:
            yield Problem(
                "megatron.megatron_args.moe_router_load_balancing_type", kind, f"of {', '.join(_BALANCING)}"
            )
    if "moe_aux_loss_coeff" in flags and len(coefficients) != len(kinds):
        yield Problem(
            "megatron.megatron_args.moe_aux_loss_coeff",
            f"{len(coefficients)} for {len(kinds)} of moe_router_load_balancing_type",
            "as many",
        )
    if "moe_router_bias_update_rate" in flags and not flags.get("moe_router_enable_expert_bias"):
        yield Problem(
            "megatron.megatron_args.moe_router_bias_update_rate",
            "it without moe_router_enable_expert_bias",
            "both: without the second the bias of routers stays as it is",
        )
    replayed = section.use_routing_replay or section.use_rollout_routing_replay
    if replayed and flags.get("moe_router_fusion"):
        yield Problem(
            "megatron.megatron_args.moe_router_fusion",
            "it beside use_routing_replay or use_rollout_routing_replay",
            "one of them: TransformerEngine's kernel chooses experts itself, and replays nothing",
        )
    again = "moe_layer_recompute" if flags.get("moe_layer_recompute") else "recompute_modules"
    stages = section.pipeline_model_parallel_size
    if (
        stages > 1
        and (replayed or any(flags.get(name) for name in _PER_MICRO_BATCH))
        and (flags.get("moe_layer_recompute") or "moe" in modules)
    ):
        yield Problem(
            f"megatron.megatron_args.{again}",
            f"it beside pipeline_model_parallel_size {stages} and losses, bias updates or replayed routes of routers",
            "whole layers: a router alone, computed again, would not know of which micro-batch",
            "use --recompute-granularity full",
        )


def _shared_expert_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    """Yield that adapters stand at layers whose communication Megatron moves elsewhere."""
    name, layers = "moe_shared_expert_overlap", ("linear_fc1", "linear_fc2")
    found = [layer for layer in layers if lora.rank is not None and lora.targets(layer)]
    if section.megatron_args.get(name) and found and section.tensor_model_parallel_size > 1:
        yield Problem(
            f"megatron.megatron_args.{name}",
            f"it beside lora.target_modules {', '.join(found)}",
            "one of them: an adapter of a shared expert communicates as its layer does, which this flag moves elsewhere",
        )
