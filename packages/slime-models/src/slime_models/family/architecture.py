"""`Architecture`: the sizes and constants of a decoder, read from config.json and checked."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from slime_core.errors import DataError

from slime_models.family.yarn import YARN_KEYS, YarnScaling, yarn_entropy


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that the model was first trained at, as Llama 3.1 does it."""

    rope_type: str
    """Kind, as config.json spells it: `llama3`."""
    factor: float
    """Divides the low frequencies."""
    low_freq_factor: float
    """Wavelengths over `original_max_position_embeddings / low_freq_factor` are divided in full."""
    high_freq_factor: float
    """Wavelengths under `original_max_position_embeddings / high_freq_factor` are left alone."""
    original_max_position_embeddings: int
    """Tokens of context before the stretch."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape and constants of a decoder. Hashable; the names are Megatron's where it has one.

    A family whose layers have more to say reads a subclass: a frozen dataclass with fields of its own, which only the layers
    that the family brings (`ModelFamily.layers`) know of.
    """

    model_type: str
    """Family, as config.json spells it."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the MLP; its first matrix has twice as many rows (gate and up)."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key and value heads; divides `num_attention_heads`."""
    head_dim: int
    """Width of a head (Megatron: `kv_channels`)."""
    vocab_size: int
    """Rows of the embedding in the Hugging Face folder."""
    norm_epsilon: float
    """Epsilon of every RMSNorm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | YarnScaling | None = None
    """Stretch of the rotary frequencies, if any."""
    partial_rotary_factor: float = 1.0
    """Share of each head's dimensions, the first ones, that are rotated."""
    rotary_interleaved: bool = False
    """Rotated dimensions are pairs of neighbours (0 and 1, 2 and 3, ...), and not of both halves."""
    max_position_embeddings: int
    """Most tokens of a sequence."""
    tie_word_embeddings: bool
    """The output layer is the embedding, and has no weight of its own."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias."""
    qk_layernorm: bool = False
    """Queries and keys pass an RMSNorm over each head."""
    post_layernorms: bool = False
    """What attention and MLP give passes an RMSNorm before it is added to the residual stream, beside those before them."""
    num_moe_experts: int | None = None
    """Experts of each layer that has some; None for a dense model."""
    dense_layers: tuple[int, ...] = ()
    """Layers, from 0, of a model with experts that have an MLP in their place; none in a dense model."""
    moe_ffn_hidden_size: int | None = None
    """Width of each expert's MLP."""
    moe_router_topk: int | None = None
    """Experts that each token passes."""
    moe_norm_topk_prob: bool = True
    """The gates of a token's experts sum to 1, before `moe_router_topk_scaling_factor`."""
    moe_router_score_function: str = "softmax"
    """What makes scores of a router's logits: `softmax` or `sigmoid`."""
    moe_router_enable_expert_bias: bool = False
    """A router adds a bias to the scores when it chooses experts, and not to the gates."""
    moe_router_num_groups: int | None = None
    """Groups of as many experts each, of which a router chooses some first; None for no groups."""
    moe_router_group_topk: int | None = None
    """Groups that each token's experts are from."""
    moe_router_topk_scaling_factor: float | None = None
    """Multiplies the gates."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the MLP that every token passes beside its experts; None where there is none."""
    moe_shared_expert_gate: bool = False
    """What that MLP gives is multiplied by the sigmoid of a product of the token with a vector."""
    mtp_num_layers: int = 0
    """Multi-token prediction (MTP) layers after the decoder's last. They are part of the model where `holds_mtp`, else they are
    copied from folder to folder unchanged."""
    holds_mtp: bool = False
    """Whether the model, and not only its folder, has the MTP layers; see `with_mtp`."""
    vocab_padding: int = 0
    """Rows of zeros after the embedding in Megatron's tensors; see `with_padded_vocab`."""

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that keep something of every token for those after it."""
        return tuple(range(self.num_layers))

    def cache_size(self, n_ranks: int) -> int:
        """Return the numbers that a rank keeps of a token in such a layer, of heads that so many ranks share: keys and values."""
        return 2 * max(1, self.num_query_groups // n_ranks) * self.head_dim

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key and value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of Megatron's fused query, key and value projection."""
        return self.query_size + 2 * self.key_value_size

    @property
    def attention_size(self) -> int:
        """Numbers in the matrices of a layer's attention."""
        return self.hidden_size * (self.qkv_size + self.query_size)

    @property
    def value_size(self) -> int:
        """Columns of the attention's output projection."""
        return self.query_size

    @property
    def gated_size(self) -> int:
        """Rows of Megatron's fused gate and up projection."""
        return 2 * self.ffn_hidden_size

    @property
    def moe_gated_size(self) -> int:
        """Rows of Megatron's fused gate and up projection of one expert; 0 for a dense model."""
        return 2 * (self.moe_ffn_hidden_size or 0)

    @property
    def two_hidden_sizes(self) -> int:
        """Columns of an MTP layer's projection of an embedding and a hidden state, concatenated."""
        return 2 * self.hidden_size

    @property
    def shared_gated_size(self) -> int:
        """Rows of Megatron's fused gate and up projection of the shared expert; 0 without one."""
        return 2 * (self.moe_shared_expert_intermediate_size or 0)

    @property
    def one(self) -> int:
        """Rows of a vector that is stored as a matrix."""
        return 1

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that have experts."""
        if self.num_moe_experts is None:
            return ()
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    @property
    def has_like_layers(self) -> bool:
        """All layers have the same tensors, by name and shape; Megatron's checkpoints stack those of such models."""
        return not self.dense_layers

    @property
    def tensor_parts(self) -> dict[str, int]:
        """What tensor-parallel ranks share out whole -> how many there are; their number divides each."""
        return {"attention heads": self.num_attention_heads, "query groups": self.num_query_groups}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in Megatron's tensors."""
        return self.vocab_size + self.vocab_padding

    def with_padded_vocab(self, multiple: int) -> Self:
        """Return a copy whose Megatron embedding has a multiple of `multiple` rows.

        The added rows are zeros: whoever computes a softmax over the padded vocabulary must leave them out.
        """
        return dataclasses.replace(self, vocab_padding=-self.vocab_size % multiple)

    def with_mtp(self, held: bool = True) -> Self:
        """Return a copy that has the MTP layers in the model, or has not."""
        return dataclasses.replace(self, holds_mtp=held)


#: More layers, or experts of a layer, no model has: each is looked at by itself.
MOST_PARTS = 10_000
_LARGEST = 10**12


class ConfigReader:
    """Reads fields of a config.json; its errors name the field, what was found and what was wanted.

    Args:
        config: the parsed file.
        where: how messages name the file.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def error(self, field: str, found: object, wanted: str) -> DataError:
        """Return the error for a field that cannot be used."""
        return DataError(f"{self._where}: {field}: found {found!r}; wanted {wanted}")

    def names(self) -> frozenset[str]:
        """Return the fields that the file has."""
        return frozenset(self._config)

    def get(self, field: str) -> Any:
        """Return the field as it is, or None where it is missing or null."""
        return self._config.get(field)

    def integer(self, field: str, default: int | None = None, *, most: int = _LARGEST) -> int:
        """Return a count of at least 1 and at most `most`; `default` where the field is missing or null."""
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, value, "a whole number of at least 1")
        if value > most:
            raise self.error(field, value, f"a whole number of at most {most}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0; `default` where the field is missing or null."""
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.error(field, value, "a number above 0")
        return float(value)

    def flag(self, field: str, *, default: bool) -> bool:
        """Return a boolean; `default` where the field is missing or null."""
        value = self._config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def require(self, field: str, supported: Collection[Any], *, default: Any) -> None:
        """Refuse a field whose value is not in `supported`; a missing or null one counts as `default`."""
        value = self._config.get(field)
        value = default if value is None else value
        if value not in supported:
            raise self.error(
                field, value, f"{' or '.join(map(repr, supported))}: nothing else is implemented"
            )

    def partial_rotary_factor(self, default: float) -> float:
        """Return the share of a head that is rotated: of the table of `rope`, or the field of older files.

        Args:
            default: where the file does not say; a family with 1 rotates whole heads, and refuses other shares.
        """
        inner = self.rope_table()
        if inner is None or inner.get("partial_rotary_factor") is None:
            inner = self
        value = inner.number("partial_rotary_factor", default)
        if value > 1:
            raise inner.error("partial_rotary_factor", value, "a number above 0 and at most 1")
        if default == 1 and value != 1:
            raise inner.error(
                "partial_rotary_factor", value, "1.0: nothing else is implemented for this family"
            )
        return value

    def rope(self, supported: Collection[str]) -> tuple[float, RopeScaling | YarnScaling | None]:
        """Return (rope_theta, scaling), from `rope_parameters` (transformers 5) or its two older fields.

        Args:
            supported: kinds of scaling that the family implements, besides none.
        """
        inner = self.rope_table()
        if inner is None:
            return self.number("rope_theta", 10_000.0), None
        theta = inner.number("rope_theta", self.number("rope_theta", 10_000.0))
        kind = inner.get("rope_type") or inner.get("type") or "default"
        if kind == "default":
            return theta, None
        if kind not in supported:
            wanted = " or ".join(repr(name) for name in ("default", *supported))
            raise inner.error("rope_type", kind, f"{wanted}: no other scaling is implemented for this family")
        if kind == "yarn":
            return theta, inner.yarn(self.integer("max_position_embeddings"))
        return theta, RopeScaling(
            rope_type=kind,
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        )

    def yarn(self, max_positions: int) -> YarnScaling:
        """Return what a table of rotary parameters says of `yarn`; what it leaves out follows from the rest.

        Source: transformers `modeling_rope_utils.py`, `_compute_yarn_parameters`, but for `attn_factor`; see `implied_attention_factor`.

        Args:
            max_positions: most tokens of a sequence, of which `factor` is a multiple where the table does not say it.
        """
        unknown = sorted(self._config.keys() - YARN_KEYS)
        if unknown:
            raise self.error(unknown[0], self.get(unknown[0]), "nothing: it is not implemented for yarn")
        context = self.integer("original_max_position_embeddings")
        factor = self.number("factor", max_positions / context)
        return YarnScaling(
            factor=factor,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=self.flag("truncate", default=True),
            attention_factor=self.number("attention_factor", self.implied_attention_factor(factor)),
            original_max_position_embeddings=context,
        )

    def implied_attention_factor(self, factor: float) -> float:
        """Return what multiplies cosine and sine where a table of `yarn` has no `attention_factor`, which SGLang and vLLM do not read.

        Source: `YaRNScalingRotaryEmbedding` of SGLang 0.5.23. transformers passes over `attn_factor`: DeepSeek-R1-0528-Qwen3-8B has it,
        and as much of it as makes the product 1.

        Args:
            factor: by which the context is stretched.
        """
        one, all_dims = (self.get(field) and self.number(field) for field in ("mscale", "mscale_all_dim"))
        usual = yarn_entropy(factor, 1.0)
        if one and all_dims:
            usual = yarn_entropy(factor, one) / yarn_entropy(factor, all_dims)
        return usual * self.number("attn_factor", 1.0)

    def rope_table(self) -> ConfigReader | None:
        """Return the reader of the table of rotary parameters; None where the file has none."""
        older, newer = self._config.get("rope_scaling"), self._config.get("rope_parameters")
        if older and newer and older != newer:
            raise self.error("rope_scaling", older, "what rope_parameters says, or only one of them")
        field, table = ("rope_scaling", older) if newer is None else ("rope_parameters", newer)
        if table is None:
            return None
        if not isinstance(table, Mapping):
            raise self.error(field, table, "a table or null")
        return ConfigReader(table, f"{self._where}: {field}")
