"""`DECODER`: the layers of the families of latent attention, with an indexer or without."""

from __future__ import annotations

from slime_core.errors import EngineError
from slime_models.family.families.latent import LatentArchitecture
from slime_models.family.families.sparse import SparseArchitecture

from slime_torch.layers.builder import Builder
from slime_torch.layers.latent_attention import LatentAttention, LatentKind
from slime_torch.layers.part import Layer
from slime_torch.layers.sparse_attention import SparseAttention, SparseKind
from slime_torch.layers.standard import layer_prefix, standard_layer
from slime_torch.model.family_decoder import FamilyDecoder


def latent_layers(builder: Builder) -> list[Layer]:
    """Return all layers.

    Raises:
        EngineError: the model's architecture says nothing of latent attention.
    """
    architecture = builder.architecture
    if not isinstance(architecture, LatentArchitecture):
        raise EngineError(
            f"{architecture.model_type}: found an architecture of the class {type(architecture).__name__}; wanted a "
            "LatentArchitecture: name another decoder in the model family"
        )
    kind: LatentKind
    if isinstance(architecture, SparseArchitecture):
        kind, part = SparseKind(builder, architecture), SparseAttention
    else:
        kind, part = LatentKind(builder, architecture), LatentAttention
    return [
        standard_layer(builder, number, part(builder, f"{layer_prefix(number)}self_attn.", kind))
        for number in range(architecture.num_layers)
    ]


DECODER = FamilyDecoder(layers=latent_layers)
