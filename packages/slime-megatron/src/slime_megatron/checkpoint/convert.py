"""`slime convert`: weights between Hugging Face folders and Megatron checkpoints, a tensor at a time."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import CheckpointError, ConfigError
from slime_core.plugins.registry import Registry
from slime_core.run.build import resolve_model

from slime_megatron.checkpoint.finding import HF, RELEASE, TRACKER, MegatronCheckpoint, find
from slime_megatron.settings.manifest import (
    DESCRIPTION,
    adapter_scale,
    check_same,
    describe,
    read_description,
)

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily
    from torch import Tensor

#: What `quantize` can make, of `slime_models.quantization.config`, and what each is.
_FORMATS = {
    "fp8-block": "float8, a scale for each 128 x 128 numbers",
    "fp8-block-ue8m0": "the same, scales rounded up to powers of 2",
    "fp8-channel": "float8, a scale for each row",
    "fp8-tensor": "float8, one scale",
    "int4": "integers from -8 to 7, a scale for each group of a row",
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

#: (number of tensors that are done, number of all) -> nothing.
Progress = Callable[[int, int], None]


def main(argv: list[str]) -> int:
    """Convert weights: `to-hf` from a run, a checkpoint or a Megatron folder; `to-megatron` from a Hugging Face folder;
    `quantize` a Hugging Face folder for servers, and `dequantize` one."""
    options = _parse(argv)
    registry = Registry.from_environment()
    if options.target.exists():
        raise CheckpointError(f"{options.target}: exists; wanted a new folder: remove it or choose another")
    if options.direction == "to-megatron":
        source = resolve_model(options.source, registry)
        to_megatron(source, options.target, registry, model_name=options.model_name, progress=_report)
    elif options.direction == "quantize":
        _quantize(options, registry)
    elif options.direction == "dequantize":
        from slime_models.quantization.folder import dequantize_folder

        source = resolve_model(options.source, registry)
        size = options.max_shard_size
        dequantize_folder(source, options.target, max_file_bytes=size, progress=_report)
    else:
        found = find(Path(options.source))
        model = options.config_from or found.model
        if model is None:
            raise CheckpointError(
                f"{options.source}: does not say which model it is; name its Hugging Face folder, for config and "
                "tokenizer: --config-from FOLDER"
            )
        to_hf(
            found.weights,
            options.target,
            registry,
            config_from=resolve_model(model, registry),
            model_name=options.model_name or found.model_name,
            passed_on_from=_start(found, registry) if options.config_from is None else None,
            max_file_bytes=options.max_shard_size,
            progress=_report,
        )
    print(options.target)
    return 0


def _start(found: MegatronCheckpoint, registry: Registry) -> Path | None:
    """Return the Hugging Face folder that a run's weights began as (see `LearnerSettings.hf_path`); None for the model's own."""
    if found.start is None:
        return None
    try:
        folder = resolve_model(found.start, registry)
    except ConfigError as error:
        raise CheckpointError(
            f"{found.weights}: its run started from {found.start} (--actor-load), which is not there, and whose layers that are "
            "not trained the result gets; put it back, or name a folder that has them: --config-from FOLDER"
        ) from error
    return folder if (folder / "config.json").is_file() else None


def _quantize(options: argparse.Namespace, registry: Registry) -> None:
    from slime_models.quantization.folder import quantize_folder

    source = resolve_model(options.source, registry)
    family, _ = _model(source, registry, options.model_name)
    n_quantized = quantize_folder(
        source,
        options.target,
        family,
        method=options.format,
        ignore=options.ignore,
        group_size=options.group_size,
        max_file_bytes=options.max_shard_size,
        progress=_report,
    )
    before, after = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (source, options.target)
    )
    print(f"{n_quantized} tensors in {options.format}; {after:,} bytes of weights instead of {before:,}")


def to_megatron(
    source: Path,
    target: Path,
    registry: Registry,
    *,
    model_name: str | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a Megatron checkpoint of a Hugging Face folder's weights, in their own dtype; holds one tensor at a time.

    `target` gets Megatron's layout of a release, and in `hf` what else the folder held, for the way back: config,
    tokenizer, and weights of layers that are passed on as they are.

    Args:
        source: Hugging Face folder.
        target: new folder.
        registry: of model families.
        model_name: which of them it is of; config.json says it when None.
        progress: is told after each tensor.

    Raises:
        CheckpointError: a weight does not fit config.json, or `target` exists.
        DataError: config.json says what is not supported; names the field.
        PluginError: no installed family has its model_type.
    """
    import torch
    from slime_models.hf.folder import copy_other_files, new_folder
    from slime_models.hf.folder import write_weights as write_hf
    from slime_models.quantization.reading import open_weights

    from slime_megatron.checkpoint.torch_dist import LazyTensor, write_weights

    family, architecture = _model(source, registry, model_name)
    hf = open_weights(source, stacked=family.stacked)
    architecture = architecture.with_mtp(family.has_mtp(hf, architecture))
    family.check_weights(hf, architecture)
    weights = family.weights(architecture)
    made = 0

    def unwritten(name: str) -> LazyTensor:
        dtypes = [hf.dtype(part) for part in weights[name].hf]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)

        def make() -> Tensor:
            nonlocal made
            made += 1
            progress(made, len(weights))
            return family.to_megatron_tensor(name, hf, architecture).to(dtype)

        return LazyTensor(weights[name].shape, dtype, make)

    with new_folder(target) as partial:
        release, extras = partial / RELEASE, partial / HF
        release.mkdir()
        extras.mkdir()
        write_weights(release, {name: unwritten(name) for name in weights}, architecture)
        copy_other_files(source, extras)
        if left := family.left_over(hf, architecture):
            write_hf(extras, ((name, hf[name]) for name in left))
        (partial / TRACKER).write_text(RELEASE)


def to_hf(
    source: Path,
    target: Path,
    registry: Registry,
    *,
    config_from: Path,
    max_file_bytes: int,
    model_name: str | None = None,
    passed_on_from: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a Hugging Face folder of a checkpoint's weights, in their own dtype, adapters merged.

    Holds one file's worth of tensors.

    Args:
        source: folder in the format `torch_dist`, written under any parallel layout.
        target: new folder.
        registry: of model families.
        config_from: Hugging Face folder whose config and tokenizer the new one gets.
        max_file_bytes: most bytes of a safetensors file.
        model_name: which family the model is of; config.json says it when None.
        passed_on_from: Hugging Face folder whose weights of layers that are passed on as they are it gets, if there are any;
            `config_from` when None.
        progress: is told after each tensor.

    Raises:
        CheckpointError: the weights do not fit config.json, which names the field or tensor; are a critic's; or `target` exists.
    """
    from slime_models.hf.config import has_weights
    from slime_models.hf.folder import save_hf
    from slime_models.quantization.reading import open_weights

    from slime_megatron.checkpoint.torch_dist import HEAD, StoredWeights

    family, architecture = _model(config_from, registry, model_name)
    stored = StoredWeights(source, architecture)
    if stored.shape(HEAD) == (1, architecture.hidden_size):
        raise CheckpointError(
            f"{source}: is a critic, whose head would be lost; wanted the policy, in the folder trainer of a checkpoint"
        )
    rest = passed_on_from or config_from
    architecture = architecture.with_mtp(stored.holds_mtp)
    description: dict[str, Any] = {}
    if (source / DESCRIPTION).exists():
        description = read_description(source)
        check_same(
            description["architecture"],
            describe(architecture),
            whose=f"{config_from}/config.json's",
            todo="give the folder of the model that was trained: --config-from FOLDER",
            prefix="architecture.",
        )
    adapter = adapter_scale(description)

    def own() -> Iterator[tuple[str, Tensor]]:
        weights = family.weights(architecture)
        for done, (name, weight) in enumerate(weights.items(), start=1):
            tensor = stored.read(name, weight.shape)
            if adapter is not None:
                tensor = stored.merged(name, tensor, rank=adapter[0], scale=adapter[1])
            yield name, tensor
            progress(done, len(weights))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        before = open_weights(rest) if has_weights(rest) else {}
        yield from family.with_copies(family.hf_tensors(own(), architecture), before, architecture)
        yield from _passed_on(rest, before, family, architecture)

    save_hf(target, tensors(), config_from=config_from, max_file_bytes=max_file_bytes)


def _passed_on(
    folder: Path, hf: Mapping[str, Tensor], family: ModelFamily, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a Hugging Face folder that are passed on as they are; say so if it lacks them."""
    if architecture.mtp_num_layers and not architecture.holds_mtp and not family.left_over(hf, architecture):
        print(
            f"{folder}: has no weights of multi-token prediction (MTP) layers, and its config.json says "
            f"{architecture.mtp_num_layers}; the result has none",
            file=sys.stderr,
        )
    yield from family.passed_on(hf, architecture)


def _model(folder: Path, registry: Registry, named: str | None) -> tuple[ModelFamily, Architecture]:
    from slime_models.family.chosen import family_of_config
    from slime_models.hf.config import read_config

    config = read_config(folder)
    family = family_of_config(registry, config, folder, named=named)
    return family, family.architecture(config)


def _report(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        print(f"\r{done} of {total} tensors", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime convert",
        description="Weights between Hugging Face folders and Megatron's torch_dist checkpoints. One tensor, or one file of "
        "the result, is in memory at a time; the result appears whole or not at all.",
    )
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    to_hf = directions.add_parser(
        "to-hf", help="a run's checkpoint, or a folder of Megatron, to Hugging Face"
    )
    to_hf.add_argument(
        "source", help="runs/NAME, runs/NAME/checkpoints/step_N, or a folder in the format torch_dist"
    )
    to_hf.add_argument("target", type=Path, help="new folder")
    to_hf.add_argument("--config-from", metavar="MODEL", help="Hugging Face folder or name of config, tokenizer and layers "
                       "that were not trained; needed where the source does not say what it came from")  # fmt: skip
    _add_model_name(to_hf)
    _add_max_shard_size(to_hf)
    quantize = directions.add_parser("quantize", help="a Hugging Face folder's linear layers to few bits, for servers "
                                     "(--sglang-model-path)")  # fmt: skip
    quantize.add_argument("source", help="Hugging Face folder, or a name that `slime models` knows")
    quantize.add_argument("target", type=Path, help="new folder")
    quantize.add_argument("--format", required=True, choices=_FORMATS, help="; ".join(f"{name}: {what}" for name, what in
                          _FORMATS.items()))  # fmt: skip
    quantize.add_argument("--ignore", nargs="+", default=[], metavar="PART", help="parts of module names, at dots, such as "
                          "self_attn: linear layers in there stay as they are")  # fmt: skip
    quantize.add_argument("--group-size", type=_count, default=128, metavar="N", help="of int4 (128)")
    _add_model_name(quantize)
    _add_max_shard_size(quantize)
    dequantize = directions.add_parser("dequantize", help="a quantised Hugging Face folder (float8, int4) to the dtype of its "
                                       "config.json, bfloat16 for most")  # fmt: skip
    dequantize.add_argument("source", help="Hugging Face folder, or a name that `slime models` knows")
    dequantize.add_argument("target", type=Path, help="new folder")
    _add_max_shard_size(dequantize)
    to_megatron = directions.add_parser("to-megatron", help="a Hugging Face folder to a folder of Megatron")
    to_megatron.add_argument("source", help="Hugging Face folder, or a name that `slime models` knows")
    to_megatron.add_argument("target", type=Path, help="new folder")
    _add_model_name(to_megatron)
    return parser.parse_args(argv)


def _add_model_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-name", metavar="FAMILY", help="which the model is of, as in a run; that of the run or of "
                        "config.json when not given")  # fmt: skip


def _add_max_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-shard-size", type=_size, default=5 * _UNITS["GB"], metavar="SIZE", help="most bytes of a "
                        "safetensors file, such as 500MB or 5GB, and of memory that holds weights (5GB)")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a number, 1 or more")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip(), re.IGNORECASE)
    n_bytes = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if n_bytes < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a size such as 500MB or 5GB")
    return n_bytes
