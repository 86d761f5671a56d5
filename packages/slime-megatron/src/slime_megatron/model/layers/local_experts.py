"""A layer's experts where one rank has all of them: tokens are sorted by expert, and nothing is sent to other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

#: How many of the first bits of a group's number of rows may differ from 0 on a CPU; see `whole_sizes`.
BITS = 4
#: Flags of Megatron's under which the rows of experts are others than a token's choices: its own dispatchers know them.
_OTHER_ROWS = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_quantization",
    "moe_shared_expert_overlap",
)


class LocalDispatcher(MoETokenDispatcher):
    """In the place of Megatron's dispatchers where one rank has all experts, each whole: one copy there and one back.

    On a CPU each expert's rows are filled up to one of few sizes with rows whose gate is 0.
    """

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows [n, hidden_size] and gates [n], sorted by expert.

        Args:
            tokens: [t, 1, hidden_size].
            routing_map: bool [t, experts]: which a token chose.
            probs: float32 [t, experts]: gates of those, 0 elsewhere.
        """
        self._shape = tokens.shape
        chosen = routing_map.t().contiguous()
        counts = chosen.sum(1)
        n_rows = len(routing_map) * self.config.moe_router_topk  # else the host would wait to count them
        experts, token_of_row = torch.nonzero_static(chosen, size=n_rows).unbind(1)
        gate_of_row = token_of_row * len(chosen) + experts
        if not tokens.is_cuda:
            counts, (token_of_row, gate_of_row) = _filled(
                counts, (token_of_row, 0), (gate_of_row, probs.numel())
            )
        self._counts, self._token_of_row = counts, token_of_row
        rows = tokens.view(-1, self._shape[-1]).index_select(0, token_of_row)
        return rows, F.pad(probs.flatten(), (0, 1)).index_select(0, gate_of_row)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return both: nothing is sent."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, the number of each expert's, and gates."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return what experts made of rows."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return it: nothing is sent."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each token's rows, [t, 1, hidden_size]."""
        n_tokens = self._shape[:-1].numel()
        summed: Tensor = _SumOfRows.apply(hidden_states, self._token_of_row, n_tokens)
        return summed.view(self._shape)


class _SumOfRows(torch.autograd.Function):
    """Add rows [n, ...] up to those [t, ...] of their tokens. Autograd's own keeps the rows, which nothing reads."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, n_tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return rows.new_zeros(n_tokens, *rows.shape[1:]).index_add_(0, token_of_row, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return gradient.index_select(0, token_of_row), None, None


class LocalExperts(MoELayer):
    """Megatron's layer of experts with `LocalDispatcher` where one rank has all experts, each whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.config
        pads = any(getattr(config, name) for name in _OTHER_ROWS)
        shared_out = config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size > 1
        if config.moe_token_dispatcher_type == "alltoall" and not shared_out and not pads:
            groups = kwargs.get("pg_collection") or get_default_pg_collection()
            self.token_dispatcher = LocalDispatcher(config, groups)


def with_local_experts(mlp: partial[Any]) -> partial[Any]:
    """Return Megatron's builder of a layer's experts, which builds `LocalExperts`."""
    return partial(LocalExperts, **mlp.keywords)


def whole_sizes(counts: Tensor) -> Tensor:
    """Return each of `counts` rounded up to a number whose bits but the first four are 0: at most an eighth more.

    oneDNN compiles a kernel for each size of matrices, a millisecond or more, and keeps the last thousand: with an expert's
    number of tokens, which is another in each layer and step, that takes longer than the products.
    """
    bits = torch.frexp(counts.double()).exponent
    step = 1 << (bits.long() - BITS).clamp(min=0)
    return (counts + step - 1) // step * step


def _filled(counts: Tensor, *columns: tuple[Tensor, int]) -> tuple[Tensor, list[Tensor]]:
    """Return the sizes [experts] of groups filled up, and each column of the rows [n] with its number in those that fill up."""
    sizes = whole_sizes(counts)
    before = (sizes - counts).cumsum(0) - (sizes - counts)
    places = torch.arange(int(counts.sum())) + before.repeat_interleave(counts)
    filled = [
        column.new_full((int(sizes.sum()),), number).index_copy_(0, places, column)
        for column, number in columns
    ]
    return sizes, filled
