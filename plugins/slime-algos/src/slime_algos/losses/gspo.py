"""Group sequence policy optimisation: PPO-clip with one ratio a sample."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.losses.policy import clipped_objective
from slime_algos.terms.ratio import importance_ratio
from slime_algos.terms.sample_sums import sample_means


@policy_objective
def gspo_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the objective of `policy_loss` with ρ = exp(mean of log π − log π_old over the sample's trained tokens).

    The paper clips at 3e-4 and 4e-4, far closer than PPO, whose 0.2 has to be asked for.

    Source: GSPO, arXiv 2507.18071, eq. 5 and 7. verl takes the gradient token by token (eq. 13): the same where
    the reducer weighs the tokens of a sample the same, as all of ours do, and no importance weights tell them apart.
    """
    mean = sample_means(log_ratio, view.loss_mask, view.offsets)[view.sample_of_token]
    return clipped_objective(
        importance_ratio(mean),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )
