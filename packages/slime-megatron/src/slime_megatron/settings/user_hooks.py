"""`MegatronHooks`: user functions that the trainer calls, and resolving them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_core.config.functions import resolve_plain
from slime_core.config.settings import Settings
from slime_core.plugins.registry import Registry

#: Entry-point group of the functions.
GROUP = "slime.megatron_hooks"
#: Field of `MegatronHooks` -> the setting that chooses it.
SETTINGS = {
    "init": "custom_megatron_init_path",
    "model_provider": "custom_model_provider_path",
    "before_log_prob": "custom_megatron_before_log_prob_hook_path",
    "rollout_data": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "post_write": "custom_update_weight_post_write_path",
}


@dataclass(frozen=True, kw_only=True)
class MegatronHooks:
    """The chosen functions; None where none is. All are called on every rank, on the trainer's thread."""

    init: Callable[..., None] | None = None
    """`(settings: LearnerSettings)`: the process groups are there, the model is about to be built."""
    model_provider: Callable[..., Any] | None = None
    """`(config, architecture, *, pre_process, post_process) -> GPTModel`, in place of `model.gpt.provide_model`."""
    before_log_prob: Callable[..., None] | None = None
    """`(model: GPTModel, role: str)`: log-probs without gradient are about to be taken; the role (`actor`, `ref`,
    `teacher`, `old_actor`) has its weights in the model."""
    rollout_data: Callable[..., None] | None = None
    """`(args: LearnerSettings, rollout_id: int, rollout_data: dict)`: advantages are there, and may be changed as loss masks
    may; see `learner.postprocess`."""
    post_write: Callable[..., None] | None = None
    """`(args: LearnerSettings, version_dir: str, rollout_engines: list)`: an update of weights by the disk is written whole, and
    still has a temporary name; the engine sees it when this returns. The list is empty: trainers do not know engines."""
    before_train_step: Callable[..., None] | None = None
    """`(step: int, optimizer_step: int, model, optimizer, scheduler)`: the policy is about to take an optimizer
    step, the `optimizer_step`-th (from 0) of `step` (from 1)."""


def resolve_hooks(registry: Registry, settings: Settings | None, **references: str | None) -> MegatronHooks:
    """Return the functions that the references mean: a name of the group, or `module:attribute`.

    Args:
        registry: the installed plugins.
        settings: of the run, for functions that were written for another system.
        references: field of `MegatronHooks` -> what chooses it.

    Raises:
        PluginError: one is not found, or is no function.
    """
    chosen: dict[str, Callable[..., Any]] = {}
    for name, reference in references.items():
        flag = "--" + SETTINGS[name].replace("_", "-")
        if reference is not None and settings is None:
            chosen[name] = registry.resolve(GROUP, reference, flag=flag)
        elif reference is not None and settings is not None:
            chosen[name] = resolve_plain(settings, registry, GROUP, reference, flag=flag)
    return MegatronHooks(**chosen)
