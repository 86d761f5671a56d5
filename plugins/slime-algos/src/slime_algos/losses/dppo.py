"""DPPO: a trust region in probability, not in its ratio, decides which tokens keep their gradient."""

from __future__ import annotations

from typing import Literal

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio


@policy_objective
def dppo_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    dppo_divergence: Literal["tv", "kl"] = "tv",
    dppo_ratio_limit: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, −sg[min(ρ, dppo_ratio_limit)]·A·log π, and nothing where the policy has moved too far already.

    Too far is a divergence of π from π_old above the bound, in the direction that A pushes to: `eps_clip_high` for
    A > 0, `eps_clip` elsewhere. The divergence is that of the sampled token against all others together: `tv`,
    |π − π_old|, or `kl`, KL(π_old || π).

    Metrics: `pg_clipfrac`, the tokens that lose their gradient.

    Source: DPPO, arXiv 2602.04879, section 5.4; verl `compute_policy_loss_dppo_tv`, `compute_policy_loss_dppo_kl`.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    # A probability is at most 1, also where rounding, or a log-prob of another model, says otherwise.
    new, old = (x.detach().clamp(max=0).exp() for x in (view.log_probs, view.log_probs - log_ratio))
    if dppo_divergence == "tv":
        divergence = (new - old).abs()
    else:
        others = torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        divergence = (1 - old) * others - old * log_ratio.detach()
    positive = advantages > 0
    outwards = torch.where(positive, new > old, new < old)
    dropped = outwards & (divergence > torch.where(positive, high, eps_clip))
    ratio = importance_ratio(log_ratio.detach()).clamp(max=dppo_ratio_limit)
    return -ratio * advantages * view.log_probs * ~dropped, {"pg_clipfrac": dropped}
