"""Hugging Face folders: reading their safetensors lazily by name, and writing them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from slime_core.errors import CheckpointError
from slime_core.files.json_text import shown
from torch import Tensor

from slime_models.hf.config import INDEX, SINGLE, read_config, read_json

_GB = 10**9
#: Files of a folder that are not copied to one that gets weights of its own.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
#: Dtypes of weights that are computed with, as config.json names them.
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: Folder of a tokenizer's chat templates beside the first.
_TEMPLATES = "additional_chat_templates"


class HfCheckpoint(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder: name -> tensor on the CPU.

    Tensors are read when they are asked for, and are views of the mapped file: copy before writing to one.
    The headers of all files are checked at once.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and the files that it lists.

    Raises:
        CheckpointError: a file is missing or corrupt, or lacks a tensor that the index promises; names it.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._handles: dict[str, Any] = {}
        index = self.folder / INDEX
        if index.is_file():
            self._file_of = self._read_index(index)
        elif (self.folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise CheckpointError(
                f"{self.folder}: found neither {SINGLE} nor {INDEX}; wanted a Hugging Face folder"
            )

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""
        handle = self._handles[self._file_of[name]]
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self[name].dtype

    def __contains__(self, name: object) -> bool:
        """Return whether the folder has the tensor, without reading it."""
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._file_of)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._file_of)

    def _read_index(self, path: Path) -> dict[str, str]:
        weight_map = read_json(path, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{path}: weight_map: found {type(weight_map).__name__}; wanted name -> file"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
                raise CheckpointError(
                    f"{path}: weight_map: {name[:100]}: found {shown(file)}; wanted the name of a file in the folder"
                )
        for file in sorted(set(weight_map.values())):
            promised = {name for name, where in weight_map.items() if where == file}
            missing = sorted(promised.difference(self._open(file).keys()))
            if missing:
                raise CheckpointError(
                    f"{self.folder / file}: lacks {missing[0]} (and {len(missing) - 1} more) of what "
                    f"{INDEX} says it holds; fetch it again"
                )
        return weight_map

    def _open(self, file: str) -> Any:
        path = self.folder / file
        if os.path.exists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{path}: no file; wanted one of safetensors; fetch it again")
        try:
            self._handles[file] = handle = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing, and {INDEX} lists it; fetch it again") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a whole safetensors file ({error}); fetch it again"
            ) from error
        return handle


class WeightFiles:
    """Writes tensors into an existing folder as safetensors: one file, or several of them and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of tensors. Their memory may be reused afterwards."""
        shard: dict[str, Tensor] = {}
        memory: set[int] = set()
        for name, tensor in tensors.items():
            held = tensor.detach().to("cpu")
            if _is_part(held) or held.data_ptr() in memory:  # safetensors refuses memory that two names share
                held = held.clone(memory_format=torch.contiguous_format)
            memory.add(held.data_ptr())
            shard[name] = held
            self._total_bytes += tensor.nbytes
        path = self._folder / f"part-{len(self._files):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors 0.8 makes it readable by its owner alone
        self._files.append((path, list(shard)))

    def finish(self) -> None:
        """Give the files their names, and write the index where there are several."""
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_file_bytes: int = 5 * _GB
) -> None:
    """Write tensors into an existing folder as safetensors: one file, or several of them and their index.

    Takes the tensors one at a time and holds at most one file's worth of them.
    """
    files = WeightFiles(folder)
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_file_bytes:
            files.write(shard)
            shard, shard_bytes = {}, 0
        shard[name] = tensor.detach().to("cpu")
        shard_bytes += tensor.nbytes
    files.write(shard)
    files.finish()


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy every file of a Hugging Face folder that holds no weights: config, tokenizer, templates."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)


def save_hf(
    folder: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config_from: Path | str,
    max_file_bytes: int = 5 * _GB,
    replaces: bool = False,
) -> Path:
    """Write a Hugging Face folder: `tensors`, and every file of `config_from` that holds no weights.

    The folder appears whole or not at all, with `replaces` also in the place of an earlier one. Where `config_from` is quantised, the
    new config.json does not say so: the tensors are not. A dtype that it names becomes the one of most of their numbers: transformers
    loads in it.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    target, source = Path(folder), Path(config_from)
    config, count = read_config(source), Counter[torch.dtype]()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            count[tensor.dtype] += tensor.numel()
            yield name, tensor

    with new_folder(target, replaces=replaces) as partial:
        copy_other_files(source, partial)
        write_weights(partial, counted(), max_file_bytes=max_file_bytes)
        is_changed = config.pop("quantization_config", None) is not None
        if _name_dtype(config, count) or is_changed:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


@contextlib.contextmanager
def new_folder(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends, and goes when it raises.

    With `replaces` a folder `target` is there until then, and stays where the new one cannot take its place.

    Raises:
        CheckpointError: `target` exists (also when another process made it meanwhile), or cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    earlier = partial.with_name(f"{partial.name}.earlier")
    is_placed = False
    try:
        if target.exists() and not replaces:
            raise CheckpointError(f"{target}: exists; wanted a new folder: remove it or choose another")
        yield partial
        partial.chmod(0o755)
        try:
            if replaces and target.exists():
                os.rename(target, earlier)
            os.rename(partial, target)
            is_placed = True
        except OSError as error:
            kept = f"; what was there is there again, or kept as {earlier}" if earlier.exists() else ""
            raise CheckpointError(f"{target}: cannot be put in place: {error}{kept}") from error
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; nothing is left of it") from error
    finally:
        if is_placed:
            shutil.rmtree(earlier, ignore_errors=True)
        elif earlier.exists():
            with contextlib.suppress(OSError):  # another one is in its place: it is kept beside it
                os.rename(earlier, target)
        shutil.rmtree(partial, ignore_errors=True)


def _name_dtype(config: dict[str, Any], count: Counter[torch.dtype]) -> bool:
    """Set the dtypes that a config.json names to the one of most numbers; return whether they were others."""
    most = next((_DTYPES.get(dtype) for dtype, _ in count.most_common(1)), None)
    text, is_changed = config.get("text_config"), False
    for part in (config, text) if isinstance(text, dict) else (config,):
        for key in ("dtype", "torch_dtype"):
            if most is not None and part.get(key) not in (None, most):
                part[key], is_changed = most, True
    return is_changed


def _is_part(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes
