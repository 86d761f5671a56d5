"""`FamilyMemory`: what the layers of a model family keep for the backward pass, where `Architecture` does not say all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError
from slime_core.plugins.importing import IMPORT_FAILURES, import_object

from slime_megatron.memory.layer_parts import attention_bytes, mlp_bytes
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape

if TYPE_CHECKING:
    from slime_models.family.family import ModelFamily

#: (architecture, how many ranks share what, micro-batch, layer of the whole model from 0) -> bytes of one rank.
KeptByLayer = Callable[[Any, Layout, MicroBatchShape, int], int]


@dataclass(frozen=True, kw_only=True)
class FamilyMemory:
    """What a family's layers keep of a micro-batch. What is left out is that of a decoder that `Architecture` says all of.

    `ModelFamily.memory` names one. `slime plan --memory` and the check before a run import it: it needs no torch.
    """

    mixer: KeptByLayer = attention_bytes
    """Bytes that the attention of a layer keeps, or what stands in its place, with the norms around it."""
    mlp: KeptByLayer = mlp_bytes
    """Bytes that the MLP or the experts of a layer keep, with the norms around it."""
    unknown: str | None = None
    """Why nothing is predicted of models of this family."""


def memory_of(family: ModelFamily) -> FamilyMemory:
    """Return what a family brings, or what `Architecture` says.

    Raises:
        PluginError: it cannot be imported, or is something else.
    """
    if family.memory is None:
        return FamilyMemory()
    where = f"model family {family.model_type}: memory"
    try:
        found = import_object(family.memory)
    except IMPORT_FAILURES as error:
        raise PluginError(
            f"{where}: {family.memory} cannot be imported: {type(error).__name__}: {error}; wanted a FamilyMemory "
            "(module:attribute)"
        ) from error
    if not isinstance(found, FamilyMemory):
        raise PluginError(f"{where}: {family.memory} is a {type(found).__name__}; wanted a FamilyMemory")
    return found
