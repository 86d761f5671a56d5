"""Settings of this package: what a launch script says that no other section has."""

from __future__ import annotations

from typing import Any

from slime_core.config.base import SectionModel


class CompatSection(SectionModel):
    """What the arguments of the original slime say beyond the settings here."""

    model_args: dict[str, Any] = {}
    """Arguments of the original slime's Megatron that describe the model, by name; they are held against its config.json."""
    custom_config: dict[str, Any] = {}
    """Keys of `--custom-config-path` that are no flags: hooks written for the original slime find them as `args.KEY`."""
    save_debug_rollout_data: str | None = None
    """File that each step's samples are written to, too, in the original slime's format: a path with `{rollout_id}` in it."""
    reference_metrics: bool = False
    """Report metrics under the original slime's names, too, where those here are others."""
    log_reward_category: str | None = None
    """Entry of reward dicts that says what kind of answer it was; shares of each are metrics, `rollout/error_cat/KIND`."""
