"""What the learner of every role begins with: the architecture that it builds, and dtype and device of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from slime_core.config.derive import compute_dtype
from slime_models.family.architecture import Architecture
from slime_models.hf.config import read_config

from slime_megatron.parallel import process_groups
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.parallel_checks import check_model


def padded_architecture(settings: LearnerSettings) -> Architecture:
    """Return the architecture of the settings' model, its vocabulary padded for tensor parallelism, without MTP layers.

    Raises:
        TrainerError: the parallel sizes do not fit it.
    """
    architecture = settings.family.architecture(read_config(settings.model_path))
    check_model(settings.megatron, architecture, settings.family)
    return architecture.with_padded_vocab(settings.megatron.tensor_model_parallel_size)


def placement(settings: LearnerSettings) -> dict[str, Any]:
    """Return the `dtype` that is computed in, and this rank's `device`."""
    return {
        "dtype": getattr(torch, compute_dtype(settings.train)),
        "device": process_groups.device(),
    }
