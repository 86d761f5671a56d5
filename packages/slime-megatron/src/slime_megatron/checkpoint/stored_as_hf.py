"""`weights_of`: the weights of a folder by their Hugging Face names, also of one of Megatron's `torch_dist` folders.

Imports torch, and not megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.quantization.reading import open_weights
from slime_models.tensor_spec import Shape
from torch import Tensor

from slime_megatron.checkpoint.finding import find
from slime_megatron.checkpoint.torch_dist import HEAD, StoredWeights
from slime_megatron.settings.manifest import DESCRIPTION, adapter_scale, check_alike, read_description

#: The tensor of a critic's head, [1, hidden_size], in folders of transformers' sequence and token classifiers.
HF_HEAD = "score.weight"


def weights_of(folder: Path, family: ModelFamily, architecture: Architecture) -> Mapping[str, Tensor]:
    """Return the weights of a folder, each read when it is asked for.

    Args:
        folder: of Hugging Face, dequantised where it is quantised; of Megatron in the format torch_dist, written under any layout; a
            run of slime, or one of its checkpoints, whose adapters are merged.
        family: of the model.
        architecture: of the model; of a folder of Megatron nothing else says it.

    Raises:
        CheckpointError: it is none of these, or damaged; or it is a run's, of another architecture.
        DataError: its config.json asks for a quantisation that is not supported.
    """
    if (folder / "config.json").is_file():
        return open_weights(folder, stacked=family.stacked)
    weights = find(folder).weights
    description = read_description(weights) if (weights / DESCRIPTION).exists() else None
    if description is None:
        return StoredAsHf(weights, family, architecture)
    check_alike(description["architecture"], architecture, whose=str(folder))
    return StoredAsHf(weights, family, architecture, adapter=adapter_scale(description))


class StoredAsHf(Mapping[str, Tensor]):
    """The weights of a `torch_dist` folder under the names that a Hugging Face folder of the model has.

    Tensors that one of Megatron's holds, such as those of queries, keys and values, are unpacked together, and kept until others are
    asked for. A folder of a critic has its head as `score.weight`, and no output layer.

    Args:
        folder: with `.metadata` and the files that it lists.
        family: of the model.
        architecture: of the model.
        adapter: rank of its adapters, and what their products are multiplied by; None where it has none.

    Raises:
        CheckpointError: it is no such folder, lacks a tensor of the model, or has one of another shape; names it.
    """

    def __init__(
        self,
        folder: Path,
        family: ModelFamily,
        architecture: Architecture,
        *,
        adapter: tuple[int, float] | None = None,
    ) -> None:
        self.folder, self._adapter = folder, adapter
        self._family, self._architecture = family, architecture.with_padded_vocab(1)
        self._stored = StoredWeights(folder, self._architecture)
        self._shapes = dict(family.hf_shapes(self._architecture))
        self._parts: dict[str, list[str]] = {}
        head = (1, architecture.hidden_size)
        if is_critic := self._stored.shape(HEAD) == head:
            self._parts[HF_HEAD], self._shapes[HF_HEAD] = [HEAD], head
        for name, weight in family.weights(self._architecture).items():
            if is_critic and name == HEAD:
                continue
            self._stored.check(name, weight.shape)
            for hf_name in weight.hf:
                self._parts.setdefault(hf_name, []).append(name)
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, in the dtype that it was saved in."""
        if name == HF_HEAD:
            return self._stored.read(HEAD, self._shapes[name])
        if name not in self._kept:
            weights = self._family.weights(self._architecture)
            read = ((part, self._read(part, weights[part].shape)) for part in self._parts[name])
            self._kept = dict(self._family.hf_tensors(read, self._architecture))
        return self._kept[name]

    def _read(self, name: str, shape: Shape) -> Tensor:
        tensor = self._stored.read(name, shape)
        if self._adapter is None:
            return tensor
        rank, scale = self._adapter
        return self._stored.merged(name, tensor, rank=rank, scale=scale)

    def __contains__(self, name: object) -> bool:
        """Return whether the model has the tensor, without reading it."""
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._parts)

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor, without reading it."""
        return self._shapes[name]
