"""Clip-Cov and KL-Cov: holding back the few tokens that collapse entropy, told by their covariance."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.losses.policy import clipped_objective
from slime_algos.terms.ratio import importance_ratio


def covariance(view: TokenView, advantages: Tensor) -> tuple[Tensor, int]:
    """Return ((A − mean A)(log π − mean log π) [T] without gradient, −inf where the mask is 0; number of trained tokens).

    The means are over the trained tokens of the view, a micro-batch: the more tokens it holds, the better.
    """
    is_trained = view.loss_mask > 0
    trained = is_trained.nonzero().squeeze(1)  # the host waits for their number, once
    log_probs = view.log_probs.detach()
    products: Tensor = (advantages - advantages[trained].mean()) * (log_probs - log_probs[trained].mean())
    return products.masked_fill(~is_trained, -torch.inf), len(trained)


@policy_objective
def clip_cov_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_low: float = 1.0,
    clip_cov_high: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the objective of `policy_loss`, and no loss from a few tokens of high covariance.

    The few are at most the share `clip_cov_ratio` of the trained tokens, at least one, of those that are not
    clipped and whose covariance is within (clip_cov_low, clip_cov_high).

    Metrics: `pg_clipfrac`, which includes the few; `cov_clipfrac`, the few.

    Source: arXiv 2505.22617, eq. 8 and 9. Where more tokens qualify the paper draws among them; we take every
    n-th, so that a run can be repeated.
    """
    ratio = importance_ratio(log_ratio)
    loss, metrics = clipped_objective(ratio, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high)
    cov, trained = covariance(view, advantages)
    candidates = ((cov > clip_cov_low) & (cov < clip_cov_high) & ~metrics["pg_clipfrac"]).nonzero().squeeze(1)
    few = max(int(clip_cov_ratio * trained), 1)
    held = torch.zeros_like(metrics["pg_clipfrac"])
    stride = max(1, -(-len(candidates) // few))
    held[candidates[::stride]] = True
    return loss * ~held, {"pg_clipfrac": metrics["pg_clipfrac"] | held, "cov_clipfrac": held}


@policy_objective
def kl_cov_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    kl_cov_ratio: float = 2e-4,
    kl_cov_coef: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take −ρA, and +kl_cov_coef · |log π − log π_old| for the tokens of highest covariance.

    Those are the share `kl_cov_ratio` of the trained tokens, at least one.

    Metrics: `cov_clipfrac`, the tokens that are held back.

    Source: arXiv 2505.22617, eq. 10 and 11.
    """
    cov, trained = covariance(view, advantages)
    few = min(max(int(kl_cov_ratio * trained), 1), trained)
    held = torch.zeros_like(view.loss_mask, dtype=torch.bool)
    held[cov.topk(few).indices] = True
    loss = -importance_ratio(log_ratio) * advantages
    return torch.where(held, loss + kl_cov_coef * log_ratio.abs(), loss), {"cov_clipfrac": held}
