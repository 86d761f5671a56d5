"""Contract kit of model families: what is converted in both directions is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import DataError
from slime_core.testing.contracts.kit import Kit
from slime_core.testing.contracts.promises import answering, require
from torch import Tensor

from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, write_weights
from slime_models.quantization.config import read_quantization
from slime_models.quantization.folder import quantize_folder

#: Largest magnitude over the largest error of float8: 28 (half of 32 in 448), but for scales of bfloat16.
_HALF_STEP = 27.5


def check_family(family: ModelFamily, config: Mapping[str, Any], *, seed: int = 0) -> None:
    """Check a model family: every Hugging Face tensor comes back from Megatron's, bit for bit, under its name and shape.

    Args:
        family: of the model.
        config: a parsed config.json, of a tiny model whose sizes differ, so that none is mistaken for another.
        seed: of the tensors' values.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"family {family.model_type}"
    found = config.get("model_type")
    require(found == family.model_type, where, found=f"a config.json of {found!r}", wanted="one of its own")
    with answering(f"{where}: config.json", "an architecture"):
        architecture = family.architecture(config)
    generator = torch.Generator().manual_seed(seed)
    with answering(where, "names and shapes"):
        hf_shapes, shapes = family.hf_shapes(architecture), family.megatron_shapes(architecture)
    require(bool(hf_shapes and shapes), where, found="a model without weights", wanted="rules that apply")
    whole = all(size > 0 for shape in (*hf_shapes.values(), *shapes.values()) for size in shape)
    require(whole, where, found="a tensor without numbers", wanted="sizes of at least 1")
    hf = {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes.items()}
    back = _there_and_back(where, family, hf, architecture)
    lost = sorted(hf.keys() - back.keys())
    require(not lost, where, found=f"no {lost[:3]} after the way back", wanted="every Hugging Face tensor")
    changed = [name for name, tensor in hf.items() if not torch.equal(back[name], tensor)]
    require(not changed, where, found=f"{changed[:3]} changed", wanted="the same numbers after the way back")
    trained = set(family.parameter_names(architecture))
    unknown = sorted(trained - shapes.keys())
    require(not unknown, where, found=f"the parameters {unknown[:3]}", wanted="names of Megatron tensors")


def check_quantized_family(
    family: ModelFamily, config: Mapping[str, Any], folder: Path, *, seed: int = 0
) -> frozenset[str]:
    """Check that a folder of a family, quantised in blocks of fp8, holds its matrices within half a step, and all else as it was.

    Args:
        family: of the model.
        config: a parsed config.json, of a tiny model.
        folder: an empty one, for the two folders that are made.
        seed: of the weights.

    Returns:
        The Hugging Face names of the matrices that are quantised.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"family {family.model_type}: quantised"
    generator = torch.Generator().manual_seed(seed)
    with answering(where, "a quantised folder"):
        shapes = family.hf_shapes(family.architecture(config))
        plain, target = folder / "plain", folder / "quantised"
        plain.mkdir()
        (plain / "config.json").write_text(json.dumps(config))
        drawn = ((name, torch.randn(shape, generator=generator)) for name, shape in shapes.items())
        write_weights(plain, drawn, max_file_bytes=10**9)
        quantize_folder(plain, target, family, method="fp8-block", group_size=32, max_file_bytes=10**9)
    before, after = HfCheckpoint(plain), HfCheckpoint(target)
    quantization = read_quantization(read_config(target))
    assert quantization is not None
    covered = frozenset(name for name, shape in shapes.items() if quantization.covers(name, shape))
    require(bool(covered), where, found="no tensor", wanted="the matrices of linear layers")
    for name in shapes:
        if name not in covered:
            same = torch.equal(after[name], before[name])
            require(same, f"{where}: {name}", found="other numbers", wanted="those that it had")
            continue
        error = float((quantization.dequantized(name, after) - before[name]).abs().max())
        bound = float(before[name].abs().max()) / _HALF_STEP
        require(
            0 < error <= bound,
            f"{where}: {name}",
            found=f"an error of {error:.1e}",
            wanted=f"up to {bound:.1e}",
        )
    return covered


#: Sizes of a config.json; heads are hidden_size / num_attention_heads wide.
_DENSE = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
#: What else a config.json holds: experts as GLM and as Qwen describe them, a model inside of another, heads of a size of their own,
#: nothing.
_MORE: tuple[dict[str, Any], ...] = (
    {
        "head_dim": 6, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.34,
    },
    {"text_config": _DENSE},
    {"text_config": _DENSE | {"num_experts": 3, "num_experts_per_tok": 2}},
    {"head_dim": 10, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True},
    {"head_dim": 10},
    {},
)  # fmt: skip


def _check_on_a_tiny_model(family: ModelFamily) -> None:
    """Check a family on the first of some tiny models that it reads."""
    configs = [{"model_type": family.model_type, **_DENSE, **more} for more in _MORE]
    check_family(family, next((each for each in configs if _reads(family, each)), configs[-1]))


def _reads(family: ModelFamily, config: Mapping[str, Any]) -> bool:
    try:
        family.architecture(config)
    except DataError:
        return False
    return True


#: The entry point `models` of `slime.kits`.
KIT = Kit(_check_on_a_tiny_model, refusals=(DataError,))


def _there_and_back(
    where: str, family: ModelFamily, hf: Mapping[str, Tensor], architecture: Architecture
) -> dict[str, Tensor]:
    """Return the Hugging Face tensors that the Megatron ones convert to, each checked against the shapes that the family tells."""
    shapes, seen, back = family.megatron_shapes(architecture), set(), {}

    def there() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in family.to_megatron(hf, architecture):
            require(name in shapes and name not in seen, where, found=f"{name}", wanted="each tensor once")
            seen.add(name)
            shape = tuple(tensor.shape)
            require(shape == shapes[name], f"{where}: {name}", found=shape, wanted=f"{shapes[name]}")
            yield name, tensor

    with answering(where, "tensors in both directions"):
        for name, tensor in family.hf_tensors(there(), architecture):
            once = name in hf and name not in back
            require(
                once, where, found=f"{name} in a Megatron tensor", wanted="each tensor of the folder once"
            )
            back[name] = tensor
    missing = sorted(shapes.keys() - seen)
    require(not missing, where, found=f"no {missing[:3]}", wanted="every Megatron tensor")
    return back
