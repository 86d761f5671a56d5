"""Checks of the folder that servers start from (`--sglang-model-path`): whether it can be served and updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.config.derive import is_local
from slime_core.errors import CheckpointError, DataError, PluginError, Problem
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.quantization.config import read_quantization
from slime_models.quantization.scheme import Quantization, specs_of
from slime_models.transfer.manifest import listed

from slime_sglang.inside.parameters import STACKED
from slime_sglang.server.command import Device, visible_device
from slime_sglang.settings.model_family import model_family

if TYPE_CHECKING:
    from slime_models.family.family import ModelFamily

_WHERE = "sglang.model_path"
_STACKED_PARTS = frozenset(part for parts in STACKED.values() for part in parts)


def served_problems(build: BuildContext, folder: Path, *, is_updated: bool) -> Iterator[Problem]:
    """Yield why servers cannot start from a folder, or why the trainer's updates cannot be quantised to its tensors.

    Args:
        build: of the run.
        folder: from which servers start.
        is_updated: whether something is trained; otherwise what no family of ours reads is left to SGLang.
    """
    try:
        family = model_family(build)
        own = family.architecture(read_config(build.model_path))
    except (DataError, PluginError):
        if is_updated:
            raise
        return
    try:
        config = read_config(folder)
        architecture = family.architecture(config)
        quantization = read_quantization(config)
    except DataError as error:
        if is_updated:
            wanted = "the run's model, quantised by `slime convert quantize`"
            yield Problem(_WHERE, f"{folder}: {error}", wanted)
        return
    if architecture != own:
        yield Problem(
            _WHERE,
            f"{folder}, whose config.json describes another model",
            f"one of the shapes of {build.model_path}",
        )
        return
    shapes = family.hf_shapes(architecture)
    if quantization is not None:
        device = _device_of_servers(build)
        yield from not_computed(
            quantization, shapes, model_type=family.model_type, device=device, is_updated=is_updated
        )
    if not is_updated:
        return
    specs = specs_of(shapes, dtype="bfloat16", quantization=quantization)
    try:
        held = HfCheckpoint(folder)
        missing = sorted(specs.keys() - held.keys())
    except CheckpointError as error:
        yield Problem(_WHERE, str(error), "a whole Hugging Face folder")
        return
    if missing:
        yield Problem(
            _WHERE,
            f"{folder}, which lacks {listed(missing)}, for which its config.json asks",
            "a folder that `slime convert quantize` wrote",
        )
    yield from _scale_problems(_WHERE, held, family, config)


def updated_folder_problems(build: BuildContext) -> Iterator[Problem]:
    """Yield why the trainer's updates cannot be quantised to the tensors of the run's own folder, from which servers start, too."""
    try:
        family, config = model_family(build), read_config(build.model_path)
        if read_quantization(config) is not None:
            held = HfCheckpoint(build.model_path)
            yield from _scale_problems("model.hf_checkpoint", held, family, config)
    except (CheckpointError, DataError, PluginError):
        return  # what has no family, no weights, or a format that nobody reads is reported by others


def _scale_problems(
    where: str, held: HfCheckpoint, family: ModelFamily, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield that a folder has scales of modules that no update quantises; what is not of the model may have some."""
    architecture, quantization = family.architecture(config), read_quantization(config)
    if quantization is None:
        return
    specs = specs_of(family.hf_shapes(architecture), dtype="bfloat16", quantization=quantization)
    scales = {name for name in held if name.endswith(f".{quantization.scale}")} - specs.keys()
    if unknown := sorted(scales - set(family.left_over(scales, architecture))):
        yield Problem(
            where,
            f"{held.folder}, which has {listed(unknown)}: its servers would hold these matrices quantised, and an update has them "
            "as they are",
            "scales of linear layers alone that `slime convert quantize` quantises",
            "dequantise the folder (`slime convert dequantize`), and quantise that for --sglang-model-path",
        )


def _device_of_servers(build: BuildContext) -> Device:
    """Return what servers compute on: as this process where they are its children; elsewhere GPUs, unless the CPU was asked for."""
    if is_local(build.settings.run):
        return visible_device()
    launcher = build.settings.sections.get("ray")
    return "cpu" if getattr(launcher, "device", None) == "cpu" else "cuda"


def not_computed(
    quantization: Quantization,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    model_type: str,
    device: Device,
    is_updated: bool = True,
) -> Iterator[Problem]:
    """Yield what SGLang cannot compute on a device, or not after an update; `shapes` are those of the trainer's tensors."""
    covered = {name: shape for name, shape in shapes.items() if quantization.covers(name, shape)}
    block = quantization.rows if quantization.rows is not None and quantization.rows > 1 else None
    if block is None:
        if device == "cuda":
            if not is_updated:
                return
            yield Problem(
                _WHERE,
                "float8 by tensor or channel, or integers of 4 bits, on a GPU",
                "float8 by blocks (fp8-block)",
                "SGLang 0.5.23 keeps the others in a layout of its kernels' into which no update can be loaded",
            )
        elif experts := [name for name in covered if ".experts." in name]:
            yield Problem(
                _WHERE,
                f"{experts[0]} in few bits by other than blocks, without a GPU",
                "float8 by blocks (fp8-block), or experts as they are",
                "quantise anew with --ignore experts",
            )
        return
    is_stacked = {name: name.split(".")[-2] in _STACKED_PARTS for name in covered}
    if straddling := [name for name, shape in covered.items() if is_stacked[name] and shape[0] % block]:
        name = straddling[0]
        yield Problem(
            _WHERE,
            f"{name} of {shapes[name][0]} rows, one of {len(straddling)} such tensors, in blocks of {block}",
            f"a multiple of {block}: SGLang stacks it with others",
            f"quantise anew with --ignore {name.split('.')[-3]}, or by another format",
        )
    if model_type == "llama":
        yield Problem(
            _WHERE,
            "float8 by blocks of a llama",
            "another format",
            "SGLang 0.5.23 looks for a llama's scales under another name, and would serve without them",
        )
