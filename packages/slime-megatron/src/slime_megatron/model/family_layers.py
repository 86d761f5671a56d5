"""`FamilyLayers`: what a model family brings where `Architecture` does not say all of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from slime_core.errors import PluginError
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from torch import Tensor

from slime_megatron.batch.rope import rotary_tables
from slime_megatron.batch.trees.flops import forward_flops
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.model.layer_spec import layer_spec
from slime_megatron.model.layers.norm import RMSNorm


def _nothing(*_: Any) -> Any:
    return {}


@dataclass(frozen=True, kw_only=True)
class FamilyLayers:
    """How the trainer builds a family's model. What is left out is that of a decoder that `Architecture` says all of.

    `ModelFamily.layers` names one, which imports Megatron; each function gets the architecture that the family read, whose
    class may have fields of its own.
    """

    layer: Callable[[TransformerConfig, Any, int], ModuleSpec] = layer_spec
    """Megatron's specification of a decoder layer, numbered from 0 in the whole model: `layer_spec`, with other attention, MLP,
    router or norms in it. Its weights must have the names of the family's rules, and those outside of tensor-parallel matrices
    the mark `sequence_parallel` (see `RMSNorm`). Megatron's checkpoints have what the modules' `sharded_state_dict` returns."""
    norm: Callable[..., torch.nn.Module] = RMSNorm
    """The norm after the last layer, built as `norm(config, hidden_size, eps)`."""
    config: Callable[[Any], Mapping[str, Any]] = _nothing
    """Fields of Megatron's `TransformerConfig` that are not as slime derives them, such as `activation_func`."""
    finish: Callable[[GPTModel, Any], Any] = _nothing
    """Called with this rank's part of the model before its weights are loaded, for what no specification says: forward hooks of
    the embedding, for example."""
    rotary_tables: Callable[..., tuple[Tensor, Tensor]] = rotary_tables
    """`(architecture, length, *, dtype)` -> cosine and sine [length, columns], of several kinds of layers side by side."""
    forward_flops: Callable[[Any, TokenTree], int] = forward_flops
    """FLOPs of a tree's forward pass, by which data-parallel ranks get equal shares."""


def block_spec(
    config: TransformerConfig, architecture: Architecture, layers: FamilyLayers
) -> TransformerBlockSubmodules:
    """Return the layers that this pipeline stage holds, and the final norm."""
    first = get_transformer_layer_offset(config)
    own = range(first, first + get_num_layers_to_build(config))
    specs = [layers.layer(config, architecture, layer) for layer in own]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=layers.norm)


def layers_of(family: ModelFamily, architecture: Architecture) -> FamilyLayers:
    """Return the layers that a family brings, or those that `Architecture` says all of.

    Raises:
        PluginError: they cannot be imported, are something else, or are missing where the architecture has fields of its own.
    """
    where = f"model family {family.model_type}: layers"
    if family.layers is None:
        if type(architecture) is not Architecture:
            raise PluginError(
                f"{where}: found none, and an architecture of the class {type(architecture).__name__}; wanted layers that "
                "know its fields: name a FamilyLayers (module:attribute)"
            )
        return FamilyLayers()
    try:
        found = import_object(family.layers)
    except IMPORT_FAILURES as error:
        raise PluginError(
            f"{where}: {family.layers} cannot be imported: {type(error).__name__}: {error}; wanted a FamilyLayers "
            "(module:attribute)"
        ) from error
    if not isinstance(found, FamilyLayers):
        raise PluginError(f"{where}: {family.layers} is a {type(found).__name__}; wanted a FamilyLayers")
    return found
