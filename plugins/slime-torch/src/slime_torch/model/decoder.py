"""The dense decoder (llama, qwen2, qwen3, glm4), written for decoding many sequences by one token each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slime_core.errors import EngineError
from slime_models.attention import dot_product_attention
from slime_models.cpu import attends_in_bfloat16
from slime_models.family.architecture import Architecture
from slime_models.upload import upload
from torch import Tensor
from torch.nn import functional as F

from slime_torch.kernels.launch import can_compile
from slime_torch.layers.torch_attention import Attention, Pass, TorchAttention
from slime_torch.storage.cache import KvCache
from slime_torch.layers.kernel_attention import KernelAttention
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rope_tables, stored_order
from slime_torch.storage.weights import Fused, Shape, Weights, can_pack

#: (layer, placed queries, keys and values of n tokens [n, heads + 2 * kv_heads, dim]) -> [n, heads * dim]
Attend = Callable[[int, Tensor], Tensor]

#: Matrices whose rows are rotated.
_TURNED = ("q_proj", "k_proj")
_RUNS = "the torch engine runs dense decoders (llama, qwen2, qwen3, glm4): choose another --rollout-engine"


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Norm
    qkv: Fused
    qkv_bias: Fused | None
    query_norm: Norm | None
    key_norm: Norm | None
    output: Fused
    post_attention_norm: Norm | None
    mlp_norm: Norm
    gate: Fused | None
    up: Fused | None
    gate_up: Fused | None
    """In the place of both, where folders have one matrix."""
    down: Fused
    post_mlp_norm: Norm | None

    def tensors(self) -> list[Fused]:
        """Return all of them."""
        return [one for one in vars(self).values() if one is not None]

    def attended(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream [n, hidden_size] after attention, of [n, heads * dim] and what it was before."""
        if self.post_attention_norm is None:
            return self.output.linear(attended, then="add", other=residual)
        return self.post_attention_norm(self.output.linear(attended)).add_(residual)

    def mlp(self, residual: Tensor) -> Tensor:
        """Return the residual stream [n, hidden_size] after the MLP, of what it was before."""
        normed = self.mlp_norm(residual)
        if self.gate is None or self.up is None:
            assert self.gate_up is not None
            gate, up = self.gate_up.linear(normed).chunk(2, dim=-1)
            inner = F.silu(gate).mul_(up)
        else:
            gate = self.gate.linear(normed, then="swish")
            inner = self.up.linear(normed, then="mul", other=gate)
        if self.post_mlp_norm is None:
            return self.down.linear(inner, then="add", other=residual)
        return self.post_mlp_norm(self.down.linear(inner)).add_(residual)


class Decoder:
    """Token ids to hidden states and logits, with a key-value cache that the caller owns.

    Args:
        architecture: the model's numbers.
        shapes: Hugging Face name -> shape of every tensor of the model (its family's `hf_shapes`).
        max_length: most positions.
        dtype: storage and compute dtype.
        device: where the weights live.
        with_kernels: compute what lies between the products by compiled kernels, where they can be compiled and run.

    Raises:
        EngineError: the model has a tensor that a dense decoder has no use for, or lacks one.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        shapes: dict[str, Shape],
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        with_kernels: bool = True,
    ) -> None:
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self.has_kernels = (
            with_kernels and device.type == "cpu" and architecture.head_dim % 16 == 0 and can_compile()
        )
        self.attention_dtype = attention_dtype(dtype, device)
        self._shapes, self._packed = shapes, can_pack(dtype, device)
        self.embedding = self._fuse("model.embed_tokens.weight", packed=False)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(architecture.num_layers)]
        self.norm = self._norm("model.norm.weight")
        self.head = self._head()
        fused = [self.embedding, self.norm, *(one for layer in self.layers for one in layer.tensors())]
        self.weights = Weights(fused if self.head is self.embedding else [*fused, self.head])
        unused = sorted(shapes.keys() - self.weights.shapes().keys())
        if unused:
            raise EngineError(
                f"{architecture.model_type}: the model has {unused[0]} and {len(unused) - 1} more tensors that the "
                f"torch engine has no use for; {_RUNS}"
            )
        self.attention = self._attention(max_length)

    def _head(self) -> Fused:
        """Return what makes logits: with tied weights the embedding, or a packed copy of it where that is faster."""
        if not self.architecture.tie_word_embeddings:
            return self._fuse("lm_head.weight")
        return self._fuse("model.embed_tokens.weight") if self._packed else self.embedding

    def _layer(self, prefix: str) -> Layer:
        def named(*names: str) -> list[str]:
            return [prefix + name for name in names]

        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        a, order = self.architecture, stored_order(self.architecture)
        is_fused = prefix + "mlp.gate_up_proj.weight" in self._shapes
        return Layer(
            input_norm=self._norm(prefix + "input_layernorm.weight"),
            qkv=self._fuse(*named(*(name + ".weight" for name in qkv))),
            qkv_bias=self._fuse(*named(*(name + ".bias" for name in qkv)), packed=False)
            if a.qkv_bias
            else None,
            query_norm=self._norm(prefix + "self_attn.q_norm.weight", order) if a.qk_layernorm else None,
            key_norm=self._norm(prefix + "self_attn.k_norm.weight", order) if a.qk_layernorm else None,
            output=self._fuse(prefix + "self_attn.o_proj.weight"),
            post_attention_norm=self._norm(prefix + "post_self_attn_layernorm.weight")
            if a.post_layernorms
            else None,
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            gate=None if is_fused else self._fuse(prefix + "mlp.gate_proj.weight"),
            up=None if is_fused else self._fuse(prefix + "mlp.up_proj.weight"),
            gate_up=self._fuse(prefix + "mlp.gate_up_proj.weight") if is_fused else None,
            down=self._fuse(prefix + "mlp.down_proj.weight"),
            post_mlp_norm=self._norm(prefix + "post_mlp_layernorm.weight") if a.post_layernorms else None,
        )

    def _attention(self, max_length: int) -> Attention:
        cosine, sine = (
            table.to(self.device, self.dtype) for table in rope_tables(self.architecture, max_length)
        )
        norms = [
            (layer.query_norm, layer.key_norm) if layer.query_norm and layer.key_norm else None
            for layer in self.layers
        ]
        kind = KernelAttention if self.has_kernels else TorchAttention
        return kind(self.architecture, tables=(cosine, sine), norms=norms)

    def _fuse(self, *names: str, packed: bool = True) -> Fused:
        parts = {name: self._shape(name) for name in names}
        order, orders = stored_order(self.architecture), {}
        if order is not None:
            dim = len(order)
            orders = {
                name: [first + place for first in range(0, shape[0], dim) for place in order]
                for name, shape in parts.items()
                if name.split(".")[-2] in _TURNED
            }
        return Fused(
            parts, dtype=self.dtype, device=self.device, packed=packed and self._packed, orders=orders
        )

    def _norm(self, name: str, order: Sequence[int] | None = None) -> Norm:
        epsilon = self.architecture.norm_epsilon
        return Norm(
            name,
            self._shape(name),
            epsilon=epsilon,
            dtype=self.dtype,
            device=self.device,
            compile_kernel=self.has_kernels,
            order=order,
        )

    def _shape(self, name: str) -> Shape:
        if name not in self._shapes:
            raise EngineError(f"{self.architecture.model_type}: the model has no {name}; {_RUNS}")
        return self._shapes[name]

    def create_cache(self, max_slots: int) -> KvCache:
        """Return an empty cache of at most `max_slots` slots, of the dtype that decoding reads."""
        dtype = self.dtype if self.has_kernels else self.attention_dtype
        return KvCache(self.architecture, max_slots=max_slots, dtype=dtype, device=self.device)

    def decode(self, tokens: Tensor, lengths: Tensor, cache: KvCache) -> Tensor:
        """Append one token to each of the first slots of the cache.

        Args:
            tokens: int64 [n], token of slot i.
            lengths: int64 [n], tokens that slot i holds, and so the new token's position.
            cache: has room for n slots of one more position than the largest of `lengths`.

        Returns:
            Normalised hidden states [n, hidden_size].
        """
        slots = torch.arange(len(tokens), device=self.device)
        now = self.attention.begin(lengths, slots, cache)
        return self._forward(tokens, now, now.attend)

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], cache: KvCache) -> Tensor:
        """Run whole prompts and store their keys and values, prompt i in slot `slots[i]`.

        Prompts of one length that follow one another share an attention kernel: best sorted by length.

        Returns:
            Normalised hidden states of each prompt's last token [prompts, hidden_size].
        """
        lengths = upload(np.array([len(prompt) for prompt in prompts]), self.device)
        tokens = upload(np.array([token for prompt in prompts for token in prompt]), self.device)
        ends = lengths.cumsum(0)
        n = len(tokens)  # told, so that a GPU need not be asked
        starts = (ends - lengths).repeat_interleave(lengths, output_size=n)
        positions = torch.arange(n, device=self.device) - starts
        where = upload(np.array(slots), self.device).repeat_interleave(lengths, output_size=n)
        a = self.architecture
        alike = [(len(list(run)), length) for length, run in itertools.groupby(prompts, len)]
        parts = [a.num_attention_heads, a.num_query_groups, a.num_query_groups]

        def attend(layer: int, heads: Tensor) -> Tensor:
            heads, attended = heads.to(self.attention_dtype), []
            for shape, run in zip(
                alike, torch.split(heads, [n * length for n, length in alike]), strict=True
            ):
                q, k, v = torch.split(run.view(*shape, -1, a.head_dim).transpose(1, 2), parts, dim=1)
                out = dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                attended.append(out.transpose(1, 2).reshape(len(run), -1))
            return torch.cat(attended).to(self.dtype)

        now = self.attention.begin(positions, where, cache)
        return self._forward(tokens, now, attend, rows=ends - 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size], in the model's dtype."""
        return self.head.linear(hidden)

    def _forward(self, tokens: Tensor, now: Pass, attend: Attend, rows: Tensor | None = None) -> Tensor:
        x = self.embedding.tensor[tokens]
        for index, layer in enumerate(self.layers):
            heads = layer.qkv.linear(layer.input_norm(x), layer.qkv_bias)
            heads = heads.view(len(x), -1, self.architecture.head_dim)
            now.place(index, heads)
            attended = attend(index, heads)
            if rows is not None and layer is self.layers[-1]:  # nobody asks for the others any more
                x, attended = x[rows], attended[rows]
            x = layer.mlp(layer.attended(attended, x))
        return self.norm(x)


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that PyTorch's attention has beside weights of `dtype`: float32 where that is faster."""
    return dtype if device.type == "cuda" or attends_in_bfloat16() else torch.float32
