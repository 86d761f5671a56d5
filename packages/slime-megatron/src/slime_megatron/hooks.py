"""What slime-megatron answers to core's hooks. Imports neither torch nor megatron."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from slime_core.config.derive import num_ranks
from slime_core.config.sections import AlgorithmSection, RolloutSection, RunSection, TrainSection
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.protocols import TOP_P_TOKENS
from slime_core.weights import transport_problems
from slime_models.transfer.names import TRANSPORTS

from slime_megatron import foreign, layout
from slime_megatron.foreign import known_flags
from slime_megatron.section import MegatronSection
from slime_megatron.section_roles import LoraSection, RolesSection

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.build import BuildContext
    from slime_core.config.settings import Settings
    from slime_models.architecture import Architecture
    from slime_models.family import ModelFamily

#: What balances experts and is right for packed rows of several sizes.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


#: Names of our trainer.
_OURS = ("megatron", "slime-megatron/megatron")


@hookimpl
def slime_config_sections() -> list[Section]:
    """Return the sections `megatron`, `roles` and `lora`."""
    return [
        Section(
            "megatron",
            MegatronSection,
            prefix="",
            foreign=ForeignFlags("megatron_args", known_flags(), refused=foreign.refused()),
        ),
        Section("roles", RolesSection, prefix=""),
        Section("lora", LoraSection),
    ]


@hookimpl
def slime_check_config(settings: Settings) -> list[Problem]:
    """Return what the trainer cannot do under these settings."""
    train = settings.section(TrainSection)
    if train.train_backend not in _OURS:
        return []
    run, section = settings.section(RunSection), settings.section(MegatronSection)
    return [
        *layout.process_problems(section, num_ranks(settings)),
        *transport_problems(train, "trainer megatron", TRANSPORTS),
        *_schedule_problems(run, train),
        *_critic_problems(run, settings.section(RolesSection)),
        *_freezing_problems(section, settings.section(LoraSection)),
        *_bias_problems(section, settings.section(LoraSection)),
        *_mtp_problems(section, settings.section(LoraSection)),
        *foreign.problems(section.megatron_args),
        *_engine_problems(section, settings.section(LoraSection)),
        *_routing_problems(settings.section(RolesSection), section),
    ]


@hookimpl
def slime_engine_needs(settings: Settings) -> list[str]:
    """Return that the experts of each token are needed, where they are replayed, and the ids it was drawn from."""
    if settings.section(TrainSection).train_backend not in _OURS:
        return []
    rollout, algorithm = settings.section(RolloutSection), settings.section(AlgorithmSection)
    needs = ["routed_experts"] if settings.section(MegatronSection).use_rollout_routing_replay else []
    is_restricted = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
    return [*needs, TOP_P_TOKENS] if is_restricted and algorithm.loss_type != "sft_loss" else needs


@hookimpl
def slime_check_build(build: BuildContext) -> list[Problem]:
    """Return the settings that the model cannot be cut by."""
    if build.section(TrainSection).train_backend not in _OURS:
        return []
    from slime_megatron.settings import family_of  # with core's assembly

    family, config = family_of(build)
    section, architecture = build.section(MegatronSection), family.architecture(config)
    found = list(layout.model_problems(section, architecture))
    if section.enable_mtp_training and architecture.mtp_num_layers:
        found += _missing_mtp(build.model_path, family, architecture)
    return found


def _missing_mtp(folder: Path, family: ModelFamily, architecture: Architecture) -> Iterator[Problem]:
    from slime_models.checkpoint import HfCheckpoint, has_weights  # imports torch

    if has_weights(folder) and not family.has_mtp(HfCheckpoint(folder), architecture):
        yield Problem(
            "megatron.enable_mtp_training",
            f"it with {folder}, whose config.json says num_nextn_predict_layers {architecture.mtp_num_layers} and whose "
            "weights lack them",
            "all tensors of these layers, which transformers drops when it saves a model",
            "take the original folder, or drop the flag",
        )


def _routing_problems(roles: RolesSection, section: MegatronSection) -> Iterator[Problem]:
    if section.use_routing_replay and roles.keep_old_actor:
        yield Problem(
            "megatron.use_routing_replay",
            "it beside roles.keep_old_actor",
            "one of them: the old actor's passes are under several weights, each with routes of its own",
        )
    flags = section.megatron_args
    kinds, coefficients = (
        value if isinstance(value, list) else [value]
        for value in (
            flags.get("moe_router_load_balancing_type", "aux_loss"),
            flags.get("moe_aux_loss_coeff", 0.0),
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
    modules = flags.get("recompute_modules", [])
    again = "moe_layer_recompute" if flags.get("moe_layer_recompute") else "recompute_modules"
    stages = section.pipeline_model_parallel_size
    if (
        stages > 1
        and (replayed or {"moe_aux_loss_coeff", "moe_z_loss_coeff"} & set(flags))
        and (flags.get("moe_layer_recompute") or "moe" in modules)
    ):
        yield Problem(
            f"megatron.megatron_args.{again}",
            f"it beside pipeline_model_parallel_size {stages} and losses or replayed routes of routers",
            "whole layers: a router alone, computed again, would not know of which micro-batch",
            "use --recompute-granularity full",
        )


def _engine_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    """Yield what is wrong about TransformerEngine."""
    flags, name = section.megatron_args, "megatron.megatron_args.transformer_impl"
    kind = flags.get("transformer_impl", "local")
    if kind not in ("local", "transformer_engine"):
        yield Problem(name, str(kind), "local or transformer_engine: others are not for training")
    if kind == "transformer_engine" and lora.rank is not None:
        yield Problem(
            name, "it beside lora.rank", "one of them: adapters stand beside Megatron's own linear layers"
        )
    for flag in ("fp8_format", "fp4_format"):
        if flag in flags and kind != "transformer_engine":
            yield Problem(
                f"megatron.megatron_args.{flag}",
                f"{flags[flag]} with transformer_impl {kind}",
                "transformer_impl transformer_engine: Megatron's own linear layers would not follow it",
            )


def _bias_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    if lora.rank is not None and section.megatron_args.get("moe_router_enable_expert_bias"):
        yield Problem(
            "megatron.megatron_args.moe_router_enable_expert_bias",
            "it beside lora.rank",
            "one of them: a folder of adapters has no place for a bias that moved",
        )


def _mtp_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    if lora.rank is not None and section.enable_mtp_training:
        yield Problem(
            "megatron.enable_mtp_training",
            "it beside lora.rank",
            "one of them: a folder of adapters has no place for layers that predict further tokens",
        )


def _freezing_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    only, frozen = section.only_train_params_name_list, section.freeze_params_name_list
    if only and frozen:
        yield Problem(
            "megatron.only_train_params_name_list", "it beside freeze_params_name_list", "one of them"
        )
    if lora.rank is not None and (only or frozen):
        yield Problem(
            "lora.rank", "it beside a list of frozen parameters", "one of them: LoRA freezes all others"
        )


def _schedule_problems(run: RunSection, train: TrainSection) -> Iterator[Problem]:
    if train.min_lr > train.lr:
        yield Problem("train.min_lr", f"{train.min_lr:g}", f"at most train.lr, {train.lr:g}")
    if train.lr_decay_style == "constant":
        return
    if train.lr_decay_iters is None and run.num_rollout is None:
        yield Problem(
            "train.lr_decay_iters",
            f"nothing, with lr_decay_style {train.lr_decay_style} and no run.num_rollout",
            "the optimizer steps of the decay",
            "set it, or run.num_rollout",
        )
    elif train.lr_decay_iters is not None and train.lr_decay_iters <= train.lr_warmup_iters:
        yield Problem(
            "train.lr_decay_iters",
            str(train.lr_decay_iters),
            f"more than lr_warmup_iters, {train.lr_warmup_iters}",
        )


def _critic_problems(run: RunSection, roles: RolesSection) -> Iterator[Problem]:
    if run.num_rollout is not None and roles.num_critic_only_steps >= run.num_rollout:
        yield Problem(
            "roles.num_critic_only_steps",
            str(roles.num_critic_only_steps),
            f"less than run.num_rollout, {run.num_rollout}",
            "else the policy is never trained",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of megatron-core and torch."""
    versions = {}
    for name in ("megatron-core", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed: the trainer megatron cannot be used"
    return versions
