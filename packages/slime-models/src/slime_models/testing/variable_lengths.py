"""`looped`: a slow stand-in for torch's flash kernel of variable lengths, for tests on a machine without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_models.attention import TELLS_GROUPS


def looped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Do in float64, query by query, what `torch.nn.attention.varlen.varlen_attn` is asked for by `variable_length_attention`.

    Each query sees the keys of its sequence up to its own, the last query being at the last key. Put in the place of the kernel's
    function, it also asserts that the call is one that the kernel allows.
    """
    assert enable_gqa == (TELLS_GROUPS and query.size(1) != key.size(-2))
    assert window_size[1] == 0
    factor, outputs = query.size(-1) ** -0.5 if scale is None else scale, []
    for i in range(len(query_ends) - 1):
        (q0, q1), (k0, k1) = query_ends[i : i + 2].tolist(), key_ends[i : i + 2].tolist()
        keys, values = key[k0:k1], value[k0:k1]
        assert q1 - q0 <= longest_query
        assert len(keys) <= longest_key
        for n in range(q0, q1):
            last = len(keys) - (q1 - n)
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            k, v = (
                x[first : last + 1].repeat_interleave(query.size(1) // x.size(1), 1).double()
                for x in (keys, values)
            )
            weights = torch.einsum("hd,khd->hk", query[n].double() * factor, k).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(outputs).to(query.dtype)
