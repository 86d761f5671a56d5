"""`DECODER`: the layers of the families of latent attention, with an indexer or without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slime_core.errors import EngineError
from slime_models.family.families.latent_attention.rules import LatentArchitecture
from slime_models.family.families.latent_attention.sparse import SparseArchitecture

from slime_torch.layers.builder import Builder
from slime_torch.layers.latent_attention import LatentAttentionPart, LatentKind
from slime_torch.layers.part import Attention, Layer
from slime_torch.layers.sparse_attention import SparseAttentionPart, SparseKind
from slime_torch.layers.standard import standard_layer
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
    part: Callable[[str], Attention]
    if isinstance(architecture, SparseArchitecture):
        sparse = SparseKind(builder, architecture)
        part = partial(SparseAttentionPart, builder, kind=sparse)
    else:
        part = partial(LatentAttentionPart, builder, kind=LatentKind(builder, architecture))
    return [
        standard_layer(builder, number, part(f"{builder.layer_prefix(number)}self_attn."))
        for number in range(architecture.num_layers)
    ]


DECODER = FamilyDecoder(layers=latent_layers)
