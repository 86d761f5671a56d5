"""Implementations of core's hooks: sections, checks, engine needs, versions. Imports neither torch nor megatron."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.derive import choices, is_local, num_ranks
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.plugins.own_name import means
from slime_core.protocols import TOP_P_TOKENS
from slime_core.weights.sync import transport_problems
from slime_models.hf.config import missing_weights

from slime_megatron.checkpoint.role_checks import role_problems
from slime_megatron.settings import checks, megatron_flags, parallel_checks
from slime_megatron.settings.megatron_flags import known_flags
from slime_megatron.settings.section import CAPABILITIES, MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry

#: Our trainer.
_OURS = "slime-megatron/megatron"


@hookimpl
def slime_config_sections() -> list[Section]:
    """Return the sections `megatron`, `roles` and `lora`."""
    return [
        Section(
            "megatron",
            MegatronSection,
            prefix="",
            foreign=ForeignFlags("megatron_args", known_flags(), refused=megatron_flags.refused()),
        ),
        Section("roles", RolesSection, prefix=""),
        Section("lora", LoraSection),
    ]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> list[Problem]:
    """Return what the trainer cannot do under these settings."""
    train = settings.train
    if not means(train.train_backend, _OURS):
        return [*checks.unread_start_problems(settings)]
    run, section = settings.run, settings.section(MegatronSection)
    return [
        *parallel_checks.process_problems(section, num_ranks(settings)),
        *checks.pool_problems(section, settings),
        *checks.changing_ref_problems(settings.cluster.pools, settings.section(RolesSection)),
        *transport_problems(train, "trainer megatron", CAPABILITIES, registry),
        *checks.section_problems(
            run, train, section, settings.section(RolesSection), settings.section(LoraSection)
        ),
        *checks.old_actor_problems(run, train, settings.rollout, settings.section(RolesSection)),
    ]


@hookimpl
def slime_check_flags(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Return the flags that nothing reads, where this trainer is chosen."""
    if not means(settings.train.train_backend, _OURS):
        return ()
    from slime_megatron.settings.unread_flags import unread_flags  # with the checks of core

    return unread_flags(settings, registry)


@hookimpl
def slime_engine_needs(settings: Settings) -> list[str]:
    """Return that the experts of each token are needed, where they are replayed, and the ids it was drawn from."""
    if not means(settings.train.train_backend, _OURS):
        return []
    rollout, algorithm = settings.rollout, settings.algorithm
    needs = ["routed_experts"] if settings.section(MegatronSection).use_rollout_routing_replay else []
    is_restricted = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
    return [*needs, TOP_P_TOKENS] if is_restricted and algorithm.loss_type != "sft_loss" else needs


@hookimpl
def slime_check_build(build: BuildContext) -> list[Problem]:
    """Return the parallel settings that the model does not allow."""
    if not means(build.settings.train.train_backend, _OURS):
        return []
    from slime_core.run.assemble import algorithm

    from slime_megatron.settings.learner_settings import family_of  # with core's assembly

    family, config = family_of(build)
    section, architecture = build.section(MegatronSection), family.architecture(config)
    reads_folder = is_local(build.settings.run) and build.section(RolesSection).actor_load is None
    if reads_folder and (missing := list(missing_weights(build.model_path))):
        return missing
    found = list(parallel_checks.model_problems(section, architecture, family))
    found += role_problems(build.section(RolesSection), family, architecture)
    computed = algorithm(build.settings, build.registry)
    if "critic" in build.settings.cluster.pools:
        found += checks.apart_problems(computed, choices(build.settings).advantage)
    if "ref" in build.settings.cluster.pools:
        has_teacher = build.section(RolesSection).opd_teacher_load is not None
        found += checks.unread_ref_problems(computed, has_teacher=has_teacher)
    found += checks.logits_problems(section, computed.needs)
    found += checks.unread_old_actor_problems(
        build.settings.train, build.section(RolesSection), computed.needs
    )
    held = architecture.with_mtp(section.enable_mtp_training)
    found += checks.frozen_layer_problems(section, family.parameter_names(held))
    save_hf, lora = build.settings.checkpoint.save_hf, build.section(LoraSection)
    found += checks.adapter_problems(
        save_hf, build.section(RolesSection).actor_load, lora, family, architecture
    )
    if section.enable_mtp_training and architecture.mtp_num_layers:
        start = build.section(RolesSection).actor_load
        found += checks.missing_mtp(Path(start or build.model_path), family, architecture)
    return found


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of megatron-core and torch, the CUDA that torch is built for, and what is used on CUDA if it is there."""
    needed = "not installed: the trainer megatron cannot be used"
    versions = {name: _version(name) or needed for name in ("megatron-core", "torch")}
    versions["CUDA of torch"] = _cuda_of_torch()
    versions["transformer-engine"] = (
        _version("transformer-engine") or "not installed; --transformer-impl transformer_engine wants it"
    )
    return versions


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str:
    """Read what torch is built for from its own `version.py`: importing torch takes seconds."""
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        found = re.search(r"^cuda\b.*= (?:'([0-9.]+)'|None)$", Path(str(file)).read_text(), re.MULTILINE)
    except (importlib.metadata.PackageNotFoundError, OSError):
        found = None
    if found is None:
        return "unknown"
    return found[1] or "none: a build for the CPU"
