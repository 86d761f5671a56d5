"""Building the policy's model, and the frozen ones: reference and teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from slime_core.errors import CheckpointError
from slime_models.family.architecture import Architecture
from slime_models.transfer.fingerprint import fingerprints
from torch import Tensor

from slime_megatron.checkpoint.stored_as_hf import weights_of
from slime_megatron.hf.load_weights import load_weights
from slime_megatron.hf.shard import global_weights
from slime_megatron.model.family_layers import FamilyLayers, layers_of
from slime_megatron.model.freezing import freeze
from slime_megatron.model.gpt import build_model
from slime_megatron.model.lora import add_adapters, clear_adapters
from slime_megatron.optim.weight_sets import WeightSets, check_same_model
from slime_megatron.settings.derive import Frozen
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.manifest import read_description
from slime_megatron.settings.trained_names import trains_layers_alike


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
    check_same_model(settings.first_path, settings.family, held, role="policy")
    start = _weights_of(settings.first_path, settings, held)
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


def layers_are_trained_alike(settings: LearnerSettings, held: Architecture) -> bool:
    """Return whether of all layers the same parameters are trained; adapters are of all."""
    section = settings.megatron
    return settings.lora.rank is not None or trains_layers_alike(
        settings.family.parameter_names(held),
        only_train=section.only_train_params_name_list,
        frozen=section.freeze_params_name_list,
    )


def add_roles(
    weight_sets: WeightSets, model: GPTModel, settings: LearnerSettings, architecture: Architecture
) -> None:
    """Give the policy's model a reference and a teacher, where estimator or loss read them.

    Raises:
        CheckpointError: a folder's weights are of another architecture than the policy's.
    """

    def load(role: str, folder: Path) -> None:
        check_same_model(folder, settings.family, architecture, role=role)

        def write() -> None:
            load_weights(model, _weights_of(folder, settings, architecture), settings.family, architecture)
            clear_adapters(model)

        weight_sets.load(role, write)

    for role, folder in settings.frozen.items():
        if folder is None:
            weight_sets.snapshot(role, checkpointed=False)
        else:
            load(role, folder)


def build_frozen(
    settings: LearnerSettings,
    architecture: Architecture,
    role: Frozen,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> GPTModel:
    """Return this rank's part of a frozen model: weights alone, on the device.

    Args:
        settings: of the learner.
        architecture: of the policy, without MTP layers.
        role: which of `settings.frozen`.
        dtype: of the weights.
        device: where they are to be.

    Raises:
        CheckpointError: the folder's weights are of another architecture than the policy's.
    """
    folder = settings.frozen[role]
    if folder is not None:
        check_same_model(folder, settings.family, architecture, role=role)
    model = build_model(
        architecture,
        settings.megatron,
        provider=settings.hooks.model_provider,
        dtype=dtype,
        device=device,
        layers=layers_of(settings.family, architecture),
    )
    weights = _weights_of(folder or settings.first_path, settings, architecture)
    load_weights(model, weights, settings.family, architecture)
    return model.requires_grad_(False)


def check_reference(folder: Path, settings: LearnerSettings) -> None:
    """Check that a checkpoint's reference is not another than the one that is asked for.

    Raises:
        CheckpointError: its run had changed its reference, and here it is that of a folder, for good.
    """
    if settings.ref_path is None or settings.roles.ref_update_interval is not None:
        return
    if "ref" in read_description(folder).get("roles", ()):
        raise CheckpointError(
            f"{folder}: found a reference that --ref-update-interval has changed; wanted that of --ref-load "
            f"{settings.ref_path}; leave --ref-load out to go on with the changed one"
        )


@contextlib.contextmanager
def same_start(folder: Path, model: GPTModel, settings: LearnerSettings) -> Iterator[None]:
    """Check that a checkpoint, which the block loads, is of a run that started from the same weights. Collective over the world.

    Parameters that are not trained show it. Where they are others, a reference would be in part of one start and in part of the
    other, and a folder of adapters would name a base that they were not trained on.

    Raises:
        CheckpointError: they are others, on whichever rank.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    before = fingerprints(one.detach() for one in frozen)
    yield
    differs = torch.tensor(
        [float(fingerprints(one.detach() for one in frozen) != before)],
        device=next(model.parameters()).device,
    )
    torch.distributed.all_reduce(differs)
    if differs.item():
        raise CheckpointError(
            f"{folder}: found other values of the parameters that are not trained than in {settings.first_path}, from which this run "
            "starts; wanted the checkpoint of a run that started from there; give --actor-load the folder that it did start from"
        )


def _weights_of(folder: Path, settings: LearnerSettings, architecture: Architecture) -> Mapping[str, Tensor]:
    """Return the weights of a folder, found to be those of the model."""
    weights = weights_of(folder, settings.family, architecture)
    settings.family.check_weights(weights, architecture)
    return weights
