"""The clipped policy-gradient loss of PPO and GRPO: PPO-clip, clip-higher, dual clip."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio


@policy_objective
def policy_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, max(−ρA, −clip(ρ, 1 − eps_clip, 1 + eps_clip_high)·A) with ρ = π/π_old.

    `eps_clip_high` is `eps_clip` when not given (clip-higher, arXiv 2503.14476, when larger); `eps_clip_c` adds the
    dual clip (arXiv 1912.09729): for A < 0 at most −eps_clip_c·A.

    Metrics: `pg_clipfrac`, where the clipped surrogate is the larger.

    Source: PPO, arXiv 1707.06347, eq. 7; slime/backends/megatron_utils/loss.py `policy_loss_function`, from
    which we differ in holding log-ratios within ±20 (see `ratio`).
    """
    return clipped_objective(
        importance_ratio(log_ratio),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )


def clipped_objective(
    ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], `pg_clipfrac`: bool [T], where the clipped surrogate is the larger); see `policy_loss`."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, {"pg_clipfrac": clipped > plain}
