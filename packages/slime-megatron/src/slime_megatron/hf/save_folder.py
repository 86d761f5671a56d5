"""What `--save-hf` writes: a Hugging Face folder of the whole model, or with LoRA a PEFT adapter folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.hf.config import has_weights
from slime_models.hf.folder import new_folder, save_hf
from slime_models.quantization.reading import open_weights
from torch import Tensor

from slime_megatron.hf.shard import whole_tensors
from slime_megatron.model.lora import adapter_weights
from slime_megatron.model.lora_math import A
from slime_megatron.settings.section_roles import LoraSection

#: The file that shows what `--save-hf` wrote: a folder of the same kind is replaced where a step is run again.
_MODEL, _ADAPTER = "config.json", "adapter_config.json"


def save_model(
    folder: Path,
    buckets: Iterable[list[tuple[str, Tensor]]],
    family: ModelFamily,
    architecture: Architecture,
    *,
    config_from: Path,
    passed_on_from: Path,
) -> None:
    """Write safetensors of at most 5 GB each, and config and tokenizer of `config_from`; holds one file's worth.

    MTP layers of `passed_on_from` which are not trained, and so on no rank, are written unchanged after the buckets' tensors.

    Collective over the world; the first rank writes. An earlier folder of the same name, from a step that is being run
    again, is replaced once the new one is complete.

    Raises:
        CheckpointError: the folder was not written by `--save-hf`, or cannot be written.
    """
    if torch.distributed.get_rank() != 0:
        for _ in buckets:  # every rank has a part in every bucket
            pass
        return
    own = ((name, tensor.to("cpu", copy=True)) for bucket in buckets for name, tensor in bucket)
    before = open_weights(passed_on_from) if has_weights(passed_on_from) else {}
    tensors = family.with_copies(own, before, architecture)
    whole = itertools.chain(tensors, family.passed_on(before, architecture))
    save_hf(folder, whole, config_from=config_from, replaces=(folder / _MODEL).is_file())


def save_adapter(
    folder: Path,
    model: GPTModel,
    family: ModelFamily,
    architecture: Architecture,
    *,
    section: LoraSection,
    base: Path,
) -> None:
    """Write a folder that PEFT loads onto the Hugging Face model `base`, with the same result as here.

    Collective over the world; the first rank writes. Where Megatron fuses projections (qkv; gate and up), each gets the
    same A and its own rows of B.

    Raises:
        CheckpointError: the folder was not written by `--save-hf`, or cannot be written.
    """
    tensors = dict(peft_tensors(model, family, architecture, section))
    if torch.distributed.get_rank() != 0:
        return
    modules = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in tensors if "lora_A" in name}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(folder, replaces=(folder / _ADAPTER).is_file()) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / _ADAPTER).write_text(json.dumps(config, indent=2) + "\n")


def peft_tensors(
    model: GPTModel, family: ModelFamily, architecture: Architecture, section: LoraSection
) -> Iterator[tuple[str, Tensor]]:
    """Yield every adapter's matrices under PEFT's names, on the CPU, each in memory of its own. Collective over the world."""
    weights = adapter_weights(family, architecture, section)
    dtype = model.config.params_dtype
    for name, tensor in whole_tensors(model, weights, architecture, Tensor.detach, dtype=dtype):
        hf, unpack = weights[name].hf, weights[name].rule.layout.unpack
        is_a = name.endswith(f".{A}")
        parts = [tensor] * len(hf) if is_a else unpack(tensor, architecture)
        for hf_name, part in zip(hf, parts, strict=True):
            stem = f"base_model.model.{hf_name.removesuffix('.weight')}"
            yield f"{stem}.lora_{'A' if is_a else 'B'}.weight", part.to("cpu", copy=True).contiguous()
