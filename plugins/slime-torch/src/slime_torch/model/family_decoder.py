"""`FamilyDecoder`: what a model family brings where `Architecture` does not say all of its decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily

from slime_torch.layers.builder import Builder
from slime_torch.layers.norm import Norm
from slime_torch.layers.part import Layer
from slime_torch.layers.standard import standard_layers


@dataclass(frozen=True, kw_only=True)
class FamilyDecoder:
    """How the engine builds a family's decoder. What is left out is that of a decoder that `Architecture` says all of.

    `ModelFamily.decoder` names one. The builder's architecture is what the family read, whose class may have fields of its own.
    """

    layers: Callable[[Builder], Sequence[Layer]] = standard_layers
    """All decoder layers. Their tensors have the Hugging Face names of the family's rules, and each is asked for once."""
    norm: Callable[[Builder, str], Norm] = Builder.norm
    """The norm after the last layer, of the weight with that name."""
    embedding_scale: Callable[[Any], float] | None = None
    """(architecture) -> what embeddings are multiplied by, rounded to the model's dtype; they are not when not given."""


def decoder_of(family: ModelFamily, architecture: Architecture) -> FamilyDecoder:
    """Return the decoder that a family brings, or the one that `Architecture` says all of.

    Raises:
        PluginError: it cannot be imported, is something else, or is missing where the family has layers of its own.
    """
    where = f"model family {family.model_type}: decoder"
    if family.decoder is None:
        if family.layers is not None or type(architecture) is not Architecture:
            raise PluginError(
                f"{where}: found none; wanted a FamilyDecoder (module:attribute): the torch engine does not know the layers "
                "that the family brings; choose another --rollout-engine"
            )
        return FamilyDecoder()
    try:
        found = import_object(family.decoder)
    except IMPORT_FAILURES as error:
        raise PluginError(
            f"{where}: {family.decoder} cannot be imported: {type(error).__name__}: {error}; wanted a FamilyDecoder "
            "(module:attribute)"
        ) from error
    if not isinstance(found, FamilyDecoder):
        raise PluginError(f"{where}: {family.decoder} is a {type(found).__name__}; wanted a FamilyDecoder")
    return found
