"""What an indexer chooses of earlier tokens (DeepSeek-V3.2, GLM-5). Imports torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Epsilon of the norm of an indexer's keys, which has a bias.
NORM_EPSILON = 1e-6


@torch.no_grad()
def chosen(query: Tensor, key: Tensor, weights: Tensor, causal: Tensor, *, most: int) -> Tensor:
    """Return bool [b, 1, l, m]: which tokens each token sees, the best of those that it may see.

    The rating of a key is the sum over heads of weight * relu(query . key), scaled.

    Args:
        query: [b, l, heads, dim].
        key: [b, m, dim].
        weights: [b, l, heads].
        causal: bool [b or 1, l, m], which tokens each may see.
        most: tokens that a token sees, fewer than m.

    Source: DeepSeek-V3.2-Exp, equation 1; transformers 5.19, `DeepseekV32Indexer`.
    """
    scale, shares = query.size(-1) ** -0.5, weights.float() * query.size(2) ** -0.5
    keys = key.float().transpose(1, 2)
    ratings = torch.zeros(query.size(0), query.size(1), key.size(1), device=query.device)
    for head in range(query.size(2)):  # one at a time: all heads' pairs would not fit
        ratings += shares[:, :, head, None] * F.relu(query[:, :, head].float() @ keys * scale)
    best = ratings.masked_fill_(~causal, float("-inf")).topk(most, dim=-1).indices
    return (torch.zeros_like(ratings, dtype=torch.bool).scatter_(-1, best, True) & causal)[:, None]
