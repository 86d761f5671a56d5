"""Settings of this package: what a launch script says that no other section has."""

from __future__ import annotations

from typing import Any

from slime_core.config.base import SectionModel


class CompatSection(SectionModel):
    """What the reference system's arguments say beyond slime's own settings."""

    model_args: dict[str, Any] = {}
    """Arguments of the reference's Megatron that describe the model, by name; they are held against its config.json."""
    custom_config: dict[str, Any] = {}
    """Keys of `--custom-config-path` that are no flags: hooks written for the reference find them as `args.KEY`."""
    save_debug_rollout_data: str | None = None
    """File that each step's samples are written to, too, in the reference's format: a path with `{rollout_id}` in it."""
    reference_metrics: bool = False
    """Report metrics under the reference system's names, too, where slime's own are others."""
    log_reward_category: str | None = None
    """Entry of reward dicts that says what kind of answer it was; shares of each are metrics, `rollout/error_cat/KIND`."""
