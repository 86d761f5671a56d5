"""Folders that the reference's Megatron wrote of models with experts: layers by themselves, norms as TransformerEngine has them.

The keys are spelled out here, after `TransformerBlock.sharded_state_dict` and the layer specs of Megatron 0.19.2; torch writes them.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed.checkpoint
from slime_core.errors import CheckpointError
from slime_megatron.checkpoint.stored_as_hf import weights_of
from slime_megatron.checkpoint.torch_dist import CheckpointKey
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE

SIZES = {
    "vocab_size": 37, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
MOE, DENSE = (
    QWEN3_MOE.architecture({"model_type": "qwen3_moe", **SIZES, **EXPERTS}),
    QWEN3.architecture({"model_type": "qwen3", **SIZES}),
)
#: What a layer has, by its name in the model -> in a folder, but for the norm before the MLP.
ATTENTION = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
}  # fmt: skip
OF_EXPERTS = {
    "mlp.experts.local_experts.{}.linear_fc1.weight": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.local_experts.{}.linear_fc2.weight": "mlp.experts.experts.linear_fc2.weight",
}
OUTSIDE = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
OWN, FUSED = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"


def tensors_of(family, architecture):
    """Return the tensors of a random model: as a Hugging Face folder has them, and as Megatron's model does."""
    generator = torch.Generator().manual_seed(0)
    shapes = family.hf_shapes(architecture)
    hf = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return hf, dict(family.to_megatron(hf, architecture))


def stored(model, *, norm, with_experts, in_one):
    """Return the tensors of a folder: layers in one tensor or each by itself, experts always in one."""
    found = {name: model[name] for name in OUTSIDE}
    names = ATTENTION | {OWN: norm}
    if with_experts:
        names |= {"mlp.router.weight": "mlp.router.weight"}
    else:
        names |= {name: name for name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")}
    layers: dict[str, list[torch.Tensor]] = {}
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        for name, key in names.items():
            layers.setdefault(key, []).append(model[prefix + name])
        for name, key in OF_EXPERTS.items() if with_experts else ():
            layers.setdefault(key, []).append(torch.stack([model[prefix + name.format(i)] for i in range(3)]))
    for key, tensors in layers.items():
        if in_one:
            found[f"decoder.layers.{key}"] = torch.stack(tensors)
        else:
            found |= {f"decoder.layers.{layer}.{key}": tensor for layer, tensor in enumerate(tensors)}
    return found


def written(tensors, folder):
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    torch.distributed.checkpoint.save(tensors, checkpoint_id=iteration, no_dist=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 7}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize("in_one", [False, True], ids=["each layer", "layers in one"])
@pytest.mark.parametrize("norm", [OWN, FUSED], ids=["transformer engine", "local layers"])
@pytest.mark.parametrize("family", [QWEN3_MOE, QWEN3], ids=["experts", "dense"])
def test_a_folder_is_read_by_whichever_names_it_has(tmp_path, family, norm, in_one):
    architecture = MOE if family is QWEN3_MOE else DENSE
    hf, model = tensors_of(family, architecture)
    folder = stored(model, norm=norm, with_experts=family is QWEN3_MOE, in_one=in_one)
    found = weights_of(written(folder, tmp_path), family, architecture)
    assert set(found) == set(hf)
    assert all(torch.equal(found[name], hf[name]) for name in hf)
    family.check_weights(found, architecture)


def test_keys_are_tried_in_the_order_of_what_is_written_here_first():
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"
    assert [(key.name, key.indices, key.counts) for key in CheckpointKey.candidates(norm, MOE)] == [
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", (1,), (2,)),
        ("decoder.layers.pre_mlp_layernorm.weight", (1,), (2,)),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", (), ()),
        ("decoder.layers.1.pre_mlp_layernorm.weight", (), ()),
    ]
    expert = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert [(key.name, key.indices, key.counts) for key in CheckpointKey.candidates(expert, MOE)] == [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 2), (2, 3)),
        ("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (2,), (3,)),
    ]


def test_a_folder_of_more_layers_than_config_json_says_is_refused_where_each_has_its_own_names(tmp_path):
    _, model = tensors_of(QWEN3_MOE, MOE)
    folder = stored(model, norm=OWN, with_experts=True, in_one=False)
    more = {
        key.replace("layers.1.", "layers.2."): tensor for key, tensor in folder.items() if "layers.1." in key
    }
    written(folder | more, tmp_path)
    with pytest.raises(
        CheckpointError, match=re.escape("has decoder.layers.2; wanted 2 layers, by config.json")
    ):
        weights_of(tmp_path, QWEN3_MOE, MOE)


def test_what_is_missing_is_named_by_all_that_it_could_be(tmp_path):
    _, model = tensors_of(QWEN3_MOE, MOE)
    folder = stored(model, norm=OWN, with_experts=True, in_one=False)
    del folder["decoder.layers.1.pre_mlp_layernorm.weight"]
    written(folder, tmp_path)
    names = " or ".join(key.name for key in CheckpointKey.candidates("decoder.layers.1." + OWN, MOE))
    with pytest.raises(
        CheckpointError, match=re.escape(f"has no {names}; wanted the weights of a qwen3_moe")
    ):
        weights_of(tmp_path, QWEN3_MOE, MOE)
