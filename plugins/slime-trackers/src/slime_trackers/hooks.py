"""Hooks of slime-trackers: sections, and checks of the trackers that are chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime_core.config.derive import trackers
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl

from slime_trackers.section import (
    MlflowSection,
    SwanlabSection,
    TensorboardSection,
    TrackioSection,
    WandbSection,
)

if TYPE_CHECKING:
    from slime_core.config.settings import Settings

#: Tracker -> the module that it needs.
_NEEDS = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}
_SECTIONS = {
    "wandb": WandbSection,
    "tb": TensorboardSection,
    "mlflow": MlflowSection,
    "swanlab": SwanlabSection,
    "trackio": TrackioSection,
}


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add a section for each tracker."""
    return [
        Section(name, section, read_by=["tensorboard" if name == "tb" else name])
        for name, section in _SECTIONS.items()
    ]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse a tracker whose program is not installed."""
    return [
        Problem(
            "run.tracker",
            repr(name),
            f"the module {module}, which is not installed",
            f"install the extra 'slime-trackers[{name}]' (README, Install selected packages)",
        )
        for name in trackers(settings.run)
        if (module := _NEEDS.get(name)) is not None and importlib.util.find_spec(module) is None
    ]
