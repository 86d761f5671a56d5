"""`MegatronHooks`: user functions that the trainer calls, and resolving them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from slime_core.plugins.registry import Registry

#: Entry-point group of the functions.
GROUP = "slime.megatron_hooks"


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
    before_train_step: Callable[..., None] | None = None
    """`(step: int, optimizer_step: int, model, optimizer, scheduler)`: the policy is about to take an optimizer
    step, the `optimizer_step`-th (from 0) of `step` (from 1)."""


def resolve_hooks(registry: Registry, **references: str | None) -> MegatronHooks:
    """Return the functions that the references mean: a name of the group, or `module:attribute`.

    Raises:
        PluginError: one is not found, or is no function.
    """
    assert references.keys() <= {field.name for field in fields(MegatronHooks)}
    return MegatronHooks(
        **{
            name: registry.resolve(GROUP, reference)
            for name, reference in references.items()
            if reference is not None
        }
    )
