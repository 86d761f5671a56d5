"""Loading Hugging Face weights into this rank's part of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from megatron.core.models.gpt import GPTModel
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from torch import Tensor

from slime_megatron.hf.shard import global_weights, own_part
from slime_megatron.model.lora_math import is_adapter


def load_weights(
    model: GPTModel,
    hf: Mapping[str, Tensor],
    family: ModelFamily,
    architecture: Architecture,
    *,
    skip: Collection[str] = (),
) -> None:
    """Copy this rank's shards of Hugging Face weights into the model, one tensor at a time, cast to its dtype.

    Args:
        model: this rank's part.
        hf: name -> tensor.
        family: the table between both sides' names.
        architecture: of the model.
        skip: weights that are left as they are, besides those of adapters.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape; names it.
    """
    family.check_names(hf, architecture)
    with torch.no_grad():
        for name, weight in global_weights(model, architecture).items():
            if name not in skip and not is_adapter(name):
                whole = family.to_megatron_tensor(name, hf, architecture)
                weight.copy_(own_part(whole, family.weight(name, architecture), architecture))
