"""Building the policy's model, and the weights of its other roles: reference and teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.checkpoint.stored_as_hf import weights_of
from slime_megatron.hf.load_weights import load_weights
from slime_megatron.hf.shard import global_weights
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.freezing import freeze
from slime_megatron.model.gpt import build_model
from slime_megatron.model.lora import add_adapters, clear_adapters
from slime_megatron.optim.weight_sets import WeightSets, check_same_model
from slime_megatron.settings.learner_settings import LearnerSettings


def build_policy(
    settings: LearnerSettings,
    held: Architecture,
    *,
    layers: FamilyLayers,
    dtype: torch.dtype,
    device: torch.device,
) -> GPTModel:
    """Return this rank's part of the policy with its initial weights, its adapters, and what is frozen.

    Args:
        settings: of the learner.
        held: the architecture, with MTP layers that are trained.
        layers: of the family.
        dtype: of the weights.
        device: where they are to be.

    Raises:
        CheckpointError: the folder's weights are not those of the model.
    """
    section = settings.megatron
    model = build_model(
        held, section, provider=settings.hooks.model_provider, dtype=dtype, device=device, layers=layers
    )
    start = _weights_of(settings.actor_path or settings.model_path, settings, held)
    load_weights(model, start, settings.family, held)
    names = global_weights(model, held)
    if settings.lora.rank is not None:
        add_adapters(model, names, settings.lora, seed=settings.seed)
        names = global_weights(model, held)
    freeze(
        model,
        names,
        settings.family.parameter_names(held),
        only_train=section.only_train_params_name_list,
        frozen=section.freeze_params_name_list,
    )
    return model


def add_roles(
    weight_sets: WeightSets, model: GPTModel, settings: LearnerSettings, architecture: Architecture
) -> None:
    """Give the policy's model a reference and a teacher, where estimator or loss read them.

    Raises:
        CheckpointError: a folder's weights are of another architecture than the policy's.
    """
    needs = settings.algorithm.needs

    def load(role: str, folder: Path) -> None:
        check_same_model(folder, settings.family, architecture, role=role)

        def write() -> None:
            load_weights(model, _weights_of(folder, settings, architecture), settings.family, architecture)
            clear_adapters(model)

        weight_sets.load(role, write)

    if "ref_log_probs" in needs:
        if settings.ref_path is None:
            weight_sets.snapshot("ref", checkpointed=False)
        else:
            load("ref", settings.ref_path)
    if "teacher_log_probs" in needs and settings.teacher_path is not None:
        load("teacher", settings.teacher_path)


def _weights_of(folder: Path, settings: LearnerSettings, architecture: Architecture) -> Mapping[str, Tensor]:
    """Return the weights of a folder, found to be those of the model."""
    weights = weights_of(folder, settings.family, architecture)
    settings.family.check_weights(weights, architecture)
    return weights
