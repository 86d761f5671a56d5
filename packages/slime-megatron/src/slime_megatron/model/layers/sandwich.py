"""`SandwichLayer`: a decoder layer with norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

_Add = Callable[..., Tensor]


class SandwichLayer(TransformerLayer):
    """Megatron's layer, with a norm of what attention gives, and of what the MLP gives, before it is added to the residual.

    Both are built as the norm before the MLP is. Their names are those that the reference system's patch of Megatron has.
    """

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        norm = partial(
            submodules.pre_mlp_layernorm,
            config=config,
            hidden_size=config.hidden_size,
            eps=config.layernorm_epsilon,
        )
        self.post_self_attn_layernorm, self.post_mlp_layernorm = norm(), norm()
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


def _after(norm: Callable[[Tensor], Tensor], bias_dropout_add: Callable[..., _Add]) -> Callable[..., _Add]:
    """Return Megatron's bias-dropout-add of what `norm` makes of its input."""

    def build(training: bool, fused: bool) -> _Add:
        add = bias_dropout_add(training, fused)

        def normed(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return normed

    return build
