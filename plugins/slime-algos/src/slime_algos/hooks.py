"""Answers to slime's hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl

from slime_algos.section import AlgosSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[algos]`; its flags carry no prefix, because the whole field uses these words."""
    return [Section("algos", AlgosSection, prefix="")]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse a KL weight that nothing would read."""
    section = settings.section(AlgosSection)
    if section.kl_loss_coef != 0 and not section.use_kl_loss:
        return [
            Problem(
                where="algos.kl_loss_coef",
                found=f"{section.kl_loss_coef} without use_kl_loss, so it has no effect",
                wanted="use_kl_loss = true, or kl_loss_coef = 0",
                todo="add --use-kl-loss",
            )
        ]
    return []
