"""Flags of the trainer that are read only beside other settings, or under estimators and losses that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.checks.unread_flags import unread_without
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.weights.sync import wanted_transport

from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry

#: Optional field of `TokenView` -> settings of the model that fills it, and what reads it.
_ROLES = {
    "values": (
        ("critic_load", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps"),
        "--advantage-estimator ppo, or another that reads values",
    ),
    "ref_log_probs": (("ref_load", "ref_update_interval"), "--use-kl-loss or --kl-coef"),
    "teacher_log_probs": (("opd_teacher_load",), "--use-opd"),
}


def unread_flags(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield the flags that nothing reads. Imports estimator and loss only where one of a role was given."""
    section = settings.section(MegatronSection)
    if section.optimizer != "sgd":
        yield from unread_without(settings, "megatron", ["sgd_momentum"], wanted="--optimizer sgd")
    if section.optimizer != "adam":
        fields = ["adam_beta1", "adam_beta2", "adam_eps"]
        yield from unread_without(settings, "train", fields, wanted="--optimizer adam")
    if not section.enable_mtp_training:
        fields = ["mtp_loss_scaling_factor"]
        yield from unread_without(settings, "megatron", fields, wanted="--enable-mtp-training")
    if not (wanted_transport(settings.train) or "").startswith("disk"):
        fields = ["custom_update_weight_post_write_path"]
        yield from unread_without(settings, "megatron", fields, wanted="--update-weight-transport disk")
    if settings.section(LoraSection).rank is None:
        yield from unread_without(settings, "lora", ["alpha", "target_modules"], wanted="--lora-rank")
    if any(settings.origin("roles", field).startswith("--") for field in RolesSection.model_fields):
        yield from _of_roles(settings, registry)


def _of_roles(settings: Settings, registry: Registry) -> Iterator[Problem]:
    from slime_core.run.assemble import algorithm

    try:
        needs = algorithm(settings, registry).needs
    except (ConfigError, PluginError):  # which is told by a check of its own
        return
    for column, (fields, wanted) in _ROLES.items():
        if column not in needs:
            yield from unread_without(settings, "roles", fields, wanted=wanted)
