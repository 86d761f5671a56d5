"""Hooks of slime-gym: its section of settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime_core.config.derive import FILE_SOURCE
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.own_name import means

from slime_gym.section import GymSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.errors import Problem


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[gym]`."""
    return [Section("gym", GymSection)]


@hookimpl
def slime_check_flags(settings: Settings) -> Iterable[Problem]:
    """Refuse flags of problems where all prompts come from files; `partial` is the reward's, which rows may choose."""
    from slime_core.checks.unread_flags import unread_without

    sources = settings.data.data_source_path, settings.eval.eval_data_source_path
    if not all(source is None or means(source, FILE_SOURCE) for source in sources):
        return ()
    fields = [field for field in GymSection.model_fields if field != "partial"]
    return unread_without(settings, "gym", fields, wanted="--data-source-path gym")
