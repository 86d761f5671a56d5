"""Reading the `quantization_config` of a config.json, and writing it for the formats of `slime convert quantize`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_core.errors import DataError
from slime_core.files.json_text import shown

from slime_models.quantization.scheme import Quantization

FIELD = "quantization_config"
#: Fields that say nothing about what is in the tensors.
_SILENT = frozenset(
    {"quant_method", "quantization_status", "version", "global_compression_ratio", "packed_modules_mapping"}
)
_FP8_FIELDS = frozenset(
    {"fmt", "activation_scheme", "weight_block_size", "scale_fmt", "modules_to_not_convert", "ignored_layers"}
)
_CT_FIELDS = frozenset({"format", "config_groups", "ignore"})
#: Fields of a group of compressed-tensors' weights, and the values that are supported; None stands for "not given".
_CT_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": (None,),
    "scale_dtype": (None,),
}
_BLOCK = [128, 128]


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return what a parsed config.json says about quantisation; None where it says nothing.

    Raises:
        DataError: it says what is not supported; names the field.
    """
    said = config.get(FIELD)
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise DataError(f"config.json: {FIELD}: found {said!r}; wanted a table")
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise _error("quant_method", method, " or ".join(repr(name) for name in _READERS))
    reader, fields = _READERS[method]
    for field in sorted(said.keys() - fields - _SILENT):
        if said[field] not in (None, False, [], {}):
            raise _error(field, said[field], "nothing: it is not supported")
    try:
        return reader(said)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        found = f"{shown(dict(said), 200)} ({error})"
        raise DataError(
            f"config.json: {FIELD}: found {found}; wanted what the method {method} has"
        ) from error


def _read_fp8(said: Mapping[str, Any]) -> Quantization:
    """Read the method `fp8`: blocks (DeepSeek, Qwen), or a scale for each tensor."""
    _require(said, "fmt", ("e4m3", "float8_e4m3fn", None))
    _require(said, "activation_scheme", ("dynamic", None))
    _require(said, "scale_fmt", ("ue8m0", "float", None))
    block = said.get("weight_block_size")
    if block is not None and not (
        len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise _error("weight_block_size", block, "two sizes")
    rows, columns = block or (None, None)
    kept = said.get("modules_to_not_convert") or said.get("ignored_layers") or ()
    return Quantization(
        bits=8,
        rows=rows,
        columns=columns,
        scale="weight_scale" if block is None else "weight_scale_inv",
        power_of_two=said.get("scale_fmt") == "ue8m0",
        ignores=_fp8_ignores(kept),
    )


def _fp8_ignores(entries: Sequence[str]) -> Callable[[str], bool]:
    """Entries are parts of module names, at dots; with or without `model.` before them."""
    whole = frozenset(entries)
    parts = [f".{entry.strip('.').removeprefix('model.')}." for entry in entries]
    return lambda module: module in whole or any(part in f".{module}." for part in parts)


def _read_compressed_tensors(said: Mapping[str, Any]) -> Quantization:
    """Read the method `compressed-tensors`: float8 by tensor or channel, and packed integers of 4 bits by group."""
    groups = said.get("config_groups") or {}
    if len(groups) != 1:
        raise _error("config_groups", f"{len(groups)} groups", "one")
    (name, group), *_ = groups.items()
    where, weights = f"config_groups.{name}", group.get("weights") or {}
    _require(group, "targets", (["Linear"],), where)
    for field, supported in _CT_WEIGHTS.items():
        _require(weights, field, supported, f"{where}.weights")
    inputs = group.get("input_activations")
    if inputs is not None:
        _require(inputs, "dynamic", (True,), f"{where}.input_activations")
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    blocks: Mapping[Any, tuple[str, Literal[4, 8], int | None, int | None]] = {
        ("float", 8, "tensor"): ("float-quantized", 8, None, None),
        ("float", 8, "channel"): ("float-quantized", 8, 1, None),
        ("int", 4, "group"): ("pack-quantized", 4, 1, weights.get("group_size")),
    }
    if kind not in blocks:
        raise _error(
            f"{where}.weights", kind, f"type, num_bits and strategy of {', '.join(map(str, blocks))}"
        )
    wanted, bits, rows, columns = blocks[kind]
    if bits == 4 and not (isinstance(columns, int) and columns > 0):
        raise _error(f"{where}.weights.group_size", columns, "the size of a group")
    found = group.get("format") or said.get("format")
    if found != wanted:
        raise _error("format", found, repr(wanted))
    return Quantization(
        bits=bits,
        rows=rows,
        columns=columns,
        scale="weight_scale",
        ignores=_compressed_tensors_ignores(said.get("ignore") or ()),
    )


def _compressed_tensors_ignores(entries: Sequence[str]) -> Callable[[str], bool]:
    """Entries are ends of module names, at dots, or begin with `re:` and are patterns of whole ones."""
    patterns = [re.compile(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
    names = tuple(f".{entry}" for entry in entries if not entry.startswith("re:"))
    return lambda module: f".{module}".endswith(names) or any(pattern.match(module) for pattern in patterns)


_READERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Quantization], frozenset[str]]] = {
    "fp8": (_read_fp8, _FP8_FIELDS),
    "compressed-tensors": (_read_compressed_tensors, _CT_FIELDS),
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Modules whose matrices stay as they are."""

    modules: Sequence[str] = ()
    """All of their names."""
    parts: Sequence[str] = ()
    """Parts of names, at dots, by which some of them were chosen: so that an engine that stacks several modules under a
    name of its own finds it, too."""


def _fp8_block(kept: Kept, group_size: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": _BLOCK,
        "modules_to_not_convert": list(kept.modules),
    }


def _fp8_block_ue8m0(kept: Kept, group_size: int) -> dict[str, Any]:
    return _fp8_block(kept, group_size) | {"scale_fmt": "ue8m0"}


def _fp8_tensor(kept: Kept, group_size: int) -> dict[str, Any]:
    return _compressed("float-quantized", {"type": "float", "num_bits": 8, "strategy": "tensor"}, kept)


def _fp8_channel(kept: Kept, group_size: int) -> dict[str, Any]:
    return _compressed("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}, kept)


def _int4(kept: Kept, group_size: int) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": group_size}
    return _compressed("pack-quantized", weights, kept)


#: Name -> what config.json says of it, of the modules that stay as they are and the group size of integers.
FORMATS: Mapping[str, Callable[[Kept, int], dict[str, Any]]] = {
    "fp8-block": _fp8_block,
    "fp8-block-ue8m0": _fp8_block_ue8m0,
    "fp8-channel": _fp8_channel,
    "fp8-tensor": _fp8_tensor,
    "int4": _int4,
}


def _compressed(kind: str, weights: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    inputs = {"type": "float", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "symmetric": True, "dynamic": False},
        "input_activations": inputs if weights["type"] == "float" else None,
    }
    patterns = [f"re:(.*[.])?{re.escape(part)}([.].*)?$" for part in kept.parts]
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*kept.modules, *patterns],
    }


def _require(said: Mapping[str, Any], field: str, supported: Collection[Any], where: str = "") -> None:
    if said.get(field) not in supported:
        wanted = " or ".join("nothing" if value is None else repr(value) for value in supported)
        raise _error(f"{where}.{field}".lstrip("."), said.get(field), wanted)


def _error(field: str, found: Any, wanted: str) -> DataError:
    return DataError(f"config.json: {FIELD}.{field}: found {found!r}; wanted {wanted}")
