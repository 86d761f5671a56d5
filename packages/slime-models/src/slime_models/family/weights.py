"""`Weight`: a rule in one layer and expert, with names and shapes, and all of them of a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core.errors import CheckpointError

from slime_models.family.architecture import Architecture
from slime_models.family.rules import EXPERT, LAYER, MTP_LAYER, Dims, Rule

Shape = tuple[int, ...]

#: What config.json says of each size of `Architecture` that a Hugging Face tensor has.
CONFIG_FIELDS = {
    "hidden_size": "hidden_size",
    "two_hidden_sizes": "2 x hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "query_size": "num_attention_heads x head_dim",
    "key_value_size": "num_key_value_heads x head_dim",
    "ffn_hidden_size": "intermediate_size",
    "gated_size": "2 x intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_gated_size": "2 x the width of an expert",
    "moe_shared_expert_intermediate_size": "moe_intermediate_size x n_shared_experts, or shared_expert_intermediate_size",
    "one": "1",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "latent_query_size": "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
    "latent_size": "kv_lora_rank + qk_rope_head_dim",
    "expanded_size": "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
    "index_query_size": "index_n_heads x index_head_dim",
    "index_head_dim": "index_head_dim",
    "index_n_heads": "index_n_heads",
    "value_size": "num_attention_heads x v_head_dim",
    "gated_query_size": "2 x num_attention_heads x head_dim",
    "linear_value_size": "linear_num_value_heads x linear_value_head_dim",
    "linear_qkv_size": "2 x linear_num_key_heads x linear_key_head_dim + linear_num_value_heads x linear_value_head_dim",
    "linear_qkvz_size": "2 x (linear_num_key_heads x linear_key_head_dim + linear_num_value_heads x linear_value_head_dim)",
    "linear_gates_size": "2 x linear_num_value_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "num_moe_experts": "the number of experts",
}


@dataclass(frozen=True)
class Weight:
    """One rule in one layer and expert: a Megatron tensor and its Hugging Face tensors, with names and shapes."""

    megatron: str
    shape: Shape
    hf: Mapping[str, Shape]
    """Name -> shape, in the order in which the rule's layout takes them."""
    rule: Rule
    expert: int | None = None
    """Which expert it belongs to; None outside of experts."""

    def check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Check the shapes of its Hugging Face tensors, given in the order of `hf`.

        Raises:
            CheckpointError: names the tensor, and the fields of config.json that say otherwise.
        """
        for found, (name, shape), (_, dims) in zip(shapes, self.hf.items(), self.rule.hf, strict=True):
            if found == shape:
                continue
            fields = [
                f"{CONFIG_FIELDS.get(dim, dim)} = {wanted}"
                for i, (dim, wanted) in enumerate(zip(dims, shape, strict=True))
                if len(found) != len(shape) or found[i] != wanted
            ]
            raise CheckpointError(
                f"{name}: found shape {found}; wanted {shape}, by config.json: {' and '.join(fields)}"
            )


def weights_of(rules: tuple[Rule, ...], architecture: Architecture) -> Mapping[str, Weight]:
    """Return Megatron name -> weight, for every tensor of a model, in the order in which they are sent."""
    weights: dict[str, Weight] = {}
    groups: list[list[Rule]] = [
        []
    ]  # rules outside layers stand alone; those of a layer stay together, layer by layer
    for rule in rules:
        if rule.when(architecture):
            if groups[-1] and (LAYER in rule.megatron) != (LAYER in groups[-1][-1].megatron):
                groups.append([])
            groups[-1].append(rule)
    for group in groups:
        all_layers = range(architecture.num_layers + architecture.mtp_num_layers)
        layers = all_layers if group and LAYER in group[0].megatron else range(1)
        for layer in layers:
            own = [rule for rule in group if LAYER not in rule.megatron or layer in rule.layers(architecture)]
            for experts, alike in itertools.groupby(own, key=lambda rule: rule.of_experts):
                members = list(alike)
                numbers = range(architecture.num_moe_experts or 0) if experts else (None,)
                for expert in numbers:
                    bound = [_bound(rule, layer, expert, architecture) for rule in members]
                    weights |= {weight.megatron: weight for weight in bound}
    return weights


def _bound(rule: Rule, layer: int, expert: int | None, architecture: Architecture) -> Weight:
    def named(name: str) -> str:
        return numbered(name, layer, architecture).replace(EXPERT, str(expert))

    def shape(dims: Dims) -> Shape:
        return tuple(getattr(architecture, dim) for dim in dims)

    hf = {named(name): shape(dims) for name, dims in rule.hf}
    megatron = named(rule.megatron.replace(LAYER, MTP_LAYER) if rule.mtp else rule.megatron)
    return Weight(megatron, shape(rule.dims), hf, rule, expert)


def numbered(name: str, layer: int, architecture: Architecture) -> str:
    """Return a name with the number of its layer in it; MTP layers follow those of the decoder, and have numbers from 0, too."""
    return name.replace(LAYER, str(layer)).replace(MTP_LAYER, str(layer - architecture.num_layers))
