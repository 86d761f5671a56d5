"""`WeightSets`: weights of several roles (reference, teacher, earlier policies) that are swapped into one model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from torch import Tensor
from torch.nn import Module, Parameter

from slime_megatron.model.parameters import MTP, named_weights
from slime_megatron.settings.manifest import check_alike, describe

#: A weight's name -> its values in another role.
WeightSet = dict[str, Tensor]


class WeightSets:
    """The weights of a model's other roles: reference, teacher, earlier policies. They are on the host, pinned with CUDA.

    A snapshot of the model holds the trained parameters and the buffers only, because frozen parameters are the same in
    all roles: with LoRA a role is as large as the adapters. Roles have no MTP layers.

    Args:
        model: this rank's part of the model, on its device, with the policy's weights; what is frozen is so already.
    """

    def __init__(self, model: Module) -> None:
        weights = named_weights(model)
        self._weights = {name: weight for name, weight in weights.items() if not name.startswith(MTP)}
        self._sets: dict[str, WeightSet] = {}
        self._checkpointed: set[str] = set()

    def __contains__(self, role: str) -> bool:
        """Return whether there is such a role."""
        return role in self._sets

    def __iter__(self) -> Iterator[str]:
        """Iterate over the roles, oldest first."""
        return iter(self._sets)

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The roles that depend on training, so that checkpoints hold them, oldest first."""
        return tuple(role for role in self._sets if role in self._checkpointed)

    def snapshot(self, role: str, *, checkpointed: bool) -> None:
        """Copy the model's trained weights, as they are now, into a role; it becomes the newest.

        Args:
            role: its name.
            checkpointed: whether the weights depend on training, so that checkpoints must hold them.
        """
        if checkpointed:
            self._checkpointed.add(role)
        self._sets[role] = self._sets.pop(role, {}) or self._empty()
        for name, held in self._sets[role].items():
            held.copy_(self._weights[name].detach())

    def load(self, role: str, write: Callable[[], None]) -> None:
        """Make a role of the weights that `write` puts into the model, whose own weights are restored afterwards."""
        self._sets[role] = _on_host(self._weights)
        try:
            with self.swapped_in(role):
                write()
        except BaseException:
            del self._sets[role]
            raise

    def drop(self, role: str) -> None:
        """Forget a role."""
        del self._sets[role]
        self._checkpointed.discard(role)

    @contextlib.contextmanager
    def swapped_in(self, role: str) -> Iterator[None]:
        """Put a role's weights into the model, and restore the model's own when the block ends, bit for bit.

        The optimizer's master weights and moments are not touched. Must not be nested.
        """
        self._exchange(self._sets[role])
        try:
            yield
        finally:
            self._exchange(self._sets[role])

    def sharded(self, role: str, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the role's part of a checkpoint.

        Args:
            role: an existing role.
            model_state: the model's own `sharded_state_dict`, which knows how each tensor is sharded.
        """
        return {
            name: dataclasses.replace(
                model_state[name], key=f"roles.{role}.{model_state[name].key}", data=held
            )
            for name, held in self._sets[role].items()
        }

    def restore(self, role: str, state: Mapping[str, Tensor]) -> None:
        """Fill an existing role with what a checkpoint holds of it."""
        for name, held in self._sets[role].items():
            held.copy_(state[name])

    def _empty(self) -> WeightSet:
        return _on_host(
            {
                name: weight
                for name, weight in self._weights.items()
                if weight.requires_grad or not isinstance(weight, Parameter)
            }
        )

    def _exchange(self, held: WeightSet) -> None:
        """Swap the model's weights with a set's: by storage where both are on one device, else by copying."""
        for name, values in held.items():
            weight = self._weights[name]
            if values.device == weight.device:
                held[name], weight.data = weight.data, values
            else:
                own = weight.detach().clone()  # one tensor more than the model, for a moment
                weight.data.copy_(values, non_blocking=True)
                values.copy_(own, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def check_same_model(folder: Path, family: ModelFamily, wanted: Architecture, *, role: str) -> None:
    """Check that a folder's weights are of the policy's architecture; one of Megatron is looked at where it is read.

    Raises:
        CheckpointError: names the first field of the architecture that differs.
    """
    if not (folder / "config.json").is_file():
        return
    check_alike(describe(family.architecture(read_config(folder))), wanted, whose=f"{role} {folder}")


def _on_host(weights: Mapping[str, Tensor]) -> WeightSet:
    """Return copies on the host, pinned where the originals are on CUDA."""
    return {
        name: torch.empty_like(w, device="cpu", pin_memory=w.is_cuda, requires_grad=False).copy_(w.detach())
        for name, w in weights.items()
    }
