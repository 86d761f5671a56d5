"""CISPO: the importance weight is clipped, and no token loses its gradient."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio


@policy_objective
def cispo_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, −sg[clip(ρ, 1 − eps_clip, 1 + eps_clip_high)]·A·log π, with sg no gradient.

    The paper bounds ρ from above only: `eps_clip` 1. `eps_clip_high` is `eps_clip` when not given; TRL's
    `epsilon_high` is the bound itself, 1 + `eps_clip_high`.

    Metrics: `pg_clipfrac`, where the ratio is clipped.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4.
    """
    ratio = importance_ratio(log_ratio.detach())
    high = eps_clip if eps_clip_high is None else eps_clip_high
    clipped = ratio.clamp(1 - eps_clip, 1 + high)
    return -clipped * advantages * view.log_probs, {"pg_clipfrac": clipped != ratio}
