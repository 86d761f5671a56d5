"""Geometric-mean policy optimisation: one ratio a sample, of tokens that are clipped one by one."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio
from slime_algos.terms.sample_sums import sample_means


@policy_objective(product=True)
def geo_mean_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take −Ā·exp(mean of the clipped log-ratios), the same for each token; Ā is the sample's mean advantage.

    Log-ratios are clipped to [−eps_clip, eps_clip_high] where that makes the objective worse; the paper's bounds
    are 0.4. `eps_clip_high` is `eps_clip` when not given. Meant for the reducer `sample-mean`.

    Metrics: `pg_clipfrac`, where a log-ratio is out of bounds.

    Importance weights enter as ratios do: by their geometric mean over the sample.

    Source: GMPO, arXiv 2507.20673, eq. 4 and listing 1.
    """
    sign = torch.sign(advantages)
    clipped = log_ratio.clamp(-eps_clip, eps_clip if eps_clip_high is None else eps_clip_high)
    worse = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = importance_ratio(sample_means(worse, view.loss_mask, view.offsets))
    credit = sample_means(advantages, view.loss_mask, view.offsets)
    return (-credit * ratio)[view.sample_of_token], {"pg_clipfrac": clipped.detach() != log_ratio.detach()}
