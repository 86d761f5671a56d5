"""Folders that hold a matrix of all experts of a layer as one tensor, where the rules of their family name each expert's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_core.errors import CheckpointError
from torch import Tensor

from slime_models.hf.folder import HfCheckpoint
from slime_models.tensor_spec import Shape

#: End of a stacked tensor's name -> what each expert's part of it is called, the parts being equal shares of the rows.
Stacked = Mapping[str, Sequence[str]]


class UnstackedCheckpoint(HfCheckpoint):
    """The weights of a folder, each expert's under a name of its own: `mlp.experts.3.up_proj.weight` of `mlp.experts.gate_up_proj`.

    Args:
        folder: Hugging Face folder.
        stacked: which tensors are stacks, [experts, rows, columns]; a folder may have all, some or none of them.

    Raises:
        CheckpointError: as HfCheckpoint, and where a stack has other dimensions; names it.
    """

    def __init__(self, folder: Path | str, stacked: Stacked) -> None:
        super().__init__(folder)
        ends = re.compile("|".join(rf"{re.escape(end)}$" for end in stacked))
        self._places: dict[str, tuple[str, int, int, int] | None] = {}
        for name in super().__iter__():
            found = ends.search(name)
            if found is None:
                self._places[name] = None
                continue
            parts, shape = stacked[found[0]], self._held(name).shape
            if len(shape) != 3 or shape[1] % len(parts):
                raise CheckpointError(
                    f"{self.folder}: {name}: found shape {tuple(shape)}; wanted experts x rows x columns, with rows for "
                    f"{' and '.join(parts)}"
                )
            experts = name.rpartition(".")[0]
            for expert in range(shape[0]):
                for number, part in enumerate(parts):
                    self._places[f"{experts}.{expert}.{part}"] = (name, expert, number, len(parts))

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, a view of the stack that it is a part of."""
        place = self._places[name]
        if place is None:
            return self._held(name)
        stack, expert, number, n_parts = place
        return self._held(stack)[expert].chunk(n_parts)[number]

    def __contains__(self, name: object) -> bool:
        """Return whether the model has the tensor, without reading it."""
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._places)

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor, without reading it."""
        place = self._places[name]
        if place is None:
            return tuple(self._held(name).shape)
        stack, _, _, n_parts = place
        _, rows, columns = self._held(stack).shape
        return rows // n_parts, columns

    def _held(self, name: str) -> Tensor:
        """Return a tensor of the folder, a view of its file."""
        return HfCheckpoint.__getitem__(self, name)
