"""The gated delta rule, chunk by chunk, and the short convolution before it: the same code on a CPU and on CUDA.

A head's state S [key width, value width] is a memory that each token decays, corrects and reads:

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

with keys and queries of length 1, and queries divided by the root of their width. Within a chunk the corrections of all tokens
are the solution of a triangular system, so that a chunk costs a few matrix products and not a step for each token.

Source: arXiv 2412.06464 (Gated DeltaNet), section 3.3 and equation 10; the chunked WY form of arXiv 2406.06484, section 3.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

#: Tokens of a chunk: more make the triangular systems, which grow with the square, dearer than the steps that they save.
CHUNK = 64
#: Added to the squared length of keys and queries, as fla and transformers do.
_EPSILON = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what each token reads, in the dtype of `value`, and the float32 state after the last one.

    A token with `log_decay` 0 and `beta` 0 leaves the state as it is: padding. Computed in float32; on CUDA by
    flash-linear-attention (`fla`) where it is installed.

    Args:
        query: [batch, tokens, key heads, key width], of any length.
        key: the same.
        value: [batch, tokens, value heads, value width]; the heads that follow one another share a key head.
        log_decay: [batch, tokens, value heads], at most 0.
        beta: [batch, tokens, value heads], from 0 to 1.
        state: float32 [batch, value heads, key width, value width] before the first token; None for zeros.
    """
    if value.is_cuda and _has_fla():
        return _by_fla(query, key, value, log_decay, beta, state)
    repeats = value.size(2) // key.size(2)
    q, k = (_unit(x)[:, :, None] for x in (query, key))
    v, g, b = (
        x.unflatten(1, (-1, repeats))
        for x in (_heads_first(value), _heads_first(log_decay), _heads_first(beta))
    )
    if state is None:
        state = v.new_zeros(*v.shape[:3], key.size(-1), value.size(-1))
    else:
        state = state.float().unflatten(1, (-1, repeats))
    out, state = _chunked(q * query.size(-1) ** -0.5, k, v, g, b, state)
    return out.flatten(1, 2).transpose(1, 2).to(value.dtype), state.flatten(1, 2)


def causal_convolution(x: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Return silu of each channel's convolution with its own last inputs: [batch, tokens, channels].

    Args:
        x: [batch, tokens, channels].
        weight: [channels, 1, width], the newest input's factor last.
        before: [batch, width - 1, channels], the inputs before the first token; None for zeros.
    """
    width = weight.size(-1)
    x = F.pad(x, (0, 0, width - 1, 0)) if before is None else torch.cat((before, x), dim=1)
    return F.silu(F.conv1d(x.transpose(1, 2), weight, groups=weight.size(0))).transpose(1, 2)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and state.

    Args:
        q: float32 [batch, key heads, 1, tokens, key width], scaled.
        k: the same, not scaled.
        v: float32 [batch, key heads, value heads of each, tokens, value width].
        g: [batch, key heads, value heads of each, tokens].
        beta: the same.
        state: [batch, key heads, value heads of each, key width, value width].
    """
    tokens = v.size(3)
    size = min(CHUNK, tokens)
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q, k, v, g[..., None], beta[..., None]))
    decayed = g.cumsum(-2)  # from the chunk's beginning to each token, as a logarithm
    # The decay from one token to another is a sum of its own: a difference of long sums would be a rounding error.
    between = g.expand(*g.shape[:-1], size).tril(-1).cumsum(-2)
    ahead = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    since = between.masked_fill(ahead, -torch.inf).exp()
    keys = k.transpose(-1, -2)
    system = beta * (k @ keys) * since
    wanted = torch.cat((beta * v, beta * decayed.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, corrections = solved.split((v.size(-1), k.size(-1)), dim=-1)
    reads, seen = q * decayed.exp(), (q @ keys) * since
    writes = (k * since[..., -1, :, None]).transpose(-1, -2)
    last = decayed[..., -1:, :].exp()
    outputs = []
    for c in range(v.size(3)):
        fresh = values[..., c, :, :] - corrections[..., c, :, :] @ state
        outputs.append(reads[..., c, :, :] @ state + seen[..., c, :, :] @ fresh)
        state = state * last[..., c, :, :] + writes[..., c, :, :] @ fresh
    return torch.cat(outputs, dim=-2)[..., :tokens, :], state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Return x [..., tokens, n] as [..., chunks, size, n], with zeros after the last token."""
    return F.pad(x, (0, 0, 0, -x.size(-2) % size)).unflatten(-2, (-1, size))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).float()


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length 1, heads first: float32 [batch, heads, tokens, width]."""
    x = _heads_first(x)
    unit: Tensor = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
    return unit


@cache
def _has_fla() -> bool:
    return find_spec("fla") is not None


def _by_fla(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]  # only where it is installed

    repeats = value.size(2) // key.size(2)
    out, last = chunk_gated_delta_rule(
        *(x.repeat_interleave(repeats, dim=2) for x in (query, key)),
        value,
        g=log_decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, last
