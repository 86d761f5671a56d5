"""`quantize_folder` and `dequantize_folder`: a quantised copy of a Hugging Face folder, and one in full precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from slime_core.errors import CheckpointError, WeightSyncError
from torch import Tensor

from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, copy_other_files, new_folder, write_weights
from slime_models.quantization.config import FIELD, FORMATS, Kept, read_quantization
from slime_models.quantization.reading import open_weights
from slime_models.quantization.scheme import LINEAR_LAYERS, WEIGHT, Quantization

#: Modules that are fused in some models' folders -> their parts.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


def quantize_folder(
    source: Path,
    target: Path,
    family: ModelFamily,
    *,
    method: str,
    ignore: Sequence[str] = (),
    group_size: int,
    max_file_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a copy of a Hugging Face folder with quantised linear layers; returns how many tensors were quantised.

    The new config.json describes the format in `quantization_config`, as inference engines read it. At most one file's
    tensors are in memory at a time.

    Args:
        source: folder of the model.
        target: folder to be made.
        family: the model's.
        method: a name of `FORMATS`.
        ignore: parts of module names between dots (`self_attn`, `model.layers.0`); linear layers whose names have one are
            not quantised.
        group_size: elements of a row that share a scale, for integer formats.
        max_file_bytes: most bytes of a safetensors file.
        progress: called with (tensors done, number of tensors) after each tensor.

    Raises:
        CheckpointError: a weight does not fit config.json, is not finite or does not fit the groups; an entry of `ignore`
            is in no linear layer's name; the folder is quantised already; or `target` exists.
    """
    config = read_config(source)
    if config.get(FIELD):
        raise CheckpointError(
            f"{source}: its config.json has {FIELD}; wanted weights that are not quantised yet"
        )
    hf, architecture = open_weights(source, stacked=family.stacked), family.architecture(config)
    family.check_weights(hf, architecture)
    ignore = [part.strip(".") for part in ignore]
    kept = _kept(hf, family, family.hf_shapes(architecture).keys(), ignore)
    config[FIELD] = FORMATS[method](Kept(modules=kept, parts=ignore), group_size)
    quantization = read_quantization(config)
    assert quantization is not None
    covered = [name for name in hf if quantization.covers(name, tuple(hf[name].shape))]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, name in enumerate(hf, start=1):
            yield from _written(name, hf[name], quantization)
            progress(done, len(hf))

    try:
        with new_folder(target) as partial:
            copy_other_files(source, partial)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            write_weights(partial, tensors(), max_file_bytes=max_file_bytes)
    except WeightSyncError as error:
        raise CheckpointError(f"{source}: {error}") from error
    return len(covered)


def dequantize_folder(
    source: Path,
    target: Path,
    *,
    max_file_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a copy of a quantised Hugging Face folder in the dtype of its config.json; returns how many tensors it has.

    Each matrix is dequantised in float32 and rounded once. At most one file's tensors are in memory at a time.

    Args:
        source: folder whose config.json has `quantization_config`, in one of the formats that are read (`quantization.config`).
        target: folder to be made.
        max_file_bytes: most bytes of a safetensors file.
        progress: called with (tensors done, number of tensors) after each tensor.

    Raises:
        CheckpointError: the folder is not quantised, or lacks scales; or `target` exists.
        DataError: its config.json asks for a quantisation that is not supported; names the field.
    """
    config = read_config(source)
    if not config.pop(FIELD, None):
        raise CheckpointError(f"{source}: its config.json has no {FIELD}; wanted a quantised folder")
    hf = open_weights(source)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, name in enumerate(hf, start=1):
            yield name, hf[name]
            progress(done, len(hf))

    with new_folder(target) as partial:
        copy_other_files(source, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_weights(partial, tensors(), max_file_bytes=max_file_bytes)
    return len(hf)


def _written(name: str, tensor: Tensor, quantization: Quantization) -> Iterator[tuple[str, Tensor]]:
    if quantization.covers(name, tuple(tensor.shape)):
        yield from quantization.tensors(name, tensor)
    else:
        yield name, tensor


def _kept(hf: HfCheckpoint, family: ModelFamily, own: Collection[str], ignore: Sequence[str]) -> list[str]:
    """Return the modules that are not quantised. Embeddings are left out: no engine takes them for linear layers.

    What is not among the family's `own` names, such as multi-token prediction layers, stays as it is.
    """
    matrices = [name for name in hf if name.endswith(WEIGHT) and hf[name].dim() == 2]
    modules = {name.removesuffix(WEIGHT): name in own for name in matrices if name != family.embedding}
    linear = {module for module, is_own in modules.items() if is_own and _leaf(module) in LINEAR_LAYERS}
    for part in ignore:
        found = {module for module in linear if f".{part}." in f".{module}."}
        if not found:
            raise CheckpointError(
                f"--ignore {part}: no linear layer left has it in its name; wanted parts of names, at dots, such as "
                "self_attn or model.layers.0"
            )
        linear -= found
    kept = [module for module in modules if module not in linear]
    stacks = dict.fromkeys(
        name.rpartition(".")[0] for name in hf if not name.endswith(WEIGHT) and hf[name].dim() == 3
    )
    return [*(name for module in kept for name in _also_by_parts(module)), *stacks]


def _also_by_parts(module: str) -> list[str]:
    """Return a module's name, and those of the parts by which SGLang looks for a fused one (`is_layer_skipped`)."""
    parent, dot, leaf = module.rpartition(".")
    return [module, *(f"{parent}{dot}{part}" for part in _FUSED.get(leaf, ()))]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
