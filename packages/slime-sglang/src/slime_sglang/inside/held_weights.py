"""`HeldWeights`: what a rank of a server holds of the tensors of an update, and how new ones get there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from slime_models.tensor_spec import Shape
from slime_models.transfer.threads import PlainCopies, copy_all
from torch import Tensor

from slime_sglang.inside.parameters import Index, held_tensors
from slime_sglang.weights.protocol import LoaderRequest

#: Attribute of a model: the shapes of an update that plain copies alone brought into it.
_COPIED = "slime_copied_shapes"


class HeldWeights:
    """What a rank holds of the tensors of an update.

    SGLang's own `load_weights` finds the parameter of each tensor by its name, which takes longer than to copy it where tensors are
    many and small. Where it got a whole update into a model by copies of what the rank holds, and did nothing else, later updates
    are copied to the same places directly. A model that derives anything from its weights stays with `load_weights`.

    Args:
        model: of the rank. Its parameters are held no longer than this object lives: SGLang may replace them between updates.
        shapes: of whole tensors, by Hugging Face name.
        request: for this rank.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Shape], request: LoaderRequest) -> None:
        self._model = model
        self.places: dict[str, tuple[Tensor, Index]] = {
            name: (tensor, index)
            for name, tensor, index in held_tensors(
                model,
                shapes,
                rank=request.rank,
                n_ranks=request.n_ranks,
                attention_ranks=request.attention_ranks,
                stage=request.stage,
            )
        }
        """By name: the parameter or a view of it, and which slices of the whole tensor it is."""
        held = {name: tuple(tensor.shape) for name, (tensor, _) in self.places.items()}
        self._shapes = dict(shapes), held
        self.is_direct: bool = model.__dict__.get(_COPIED) == self._shapes
        """Whether tensors are copied to their places directly."""
        self._only_copied, self._n_copied = True, 0

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors of an update, whose names and shapes were checked."""
        if self.is_direct:
            held = ((*self.places[name], tensor) for name, tensor in tensors if name in self.places)
            copy_all([(place, tensor[index]) for place, index, tensor in held])
            return
        with PlainCopies() as copies:
            self._model.load_weights(tensors)
        self._only_copied &= copies.only_copied
        self._n_copied += copies.n_copied

    def end(self) -> None:
        """Be told that all tensors of an update were loaded, and that each place holds what was sent."""
        if self.is_direct:
            return
        held = [tensor for tensor, _ in self.places.values()]
        own = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        are_own = all(tensor.untyped_storage().data_ptr() in own for tensor in held)
        if self._only_copied and are_own and self._n_copied == sum(tensor.numel() for tensor in held):
            setattr(self._model, _COPIED, self._shapes)
