"""The plain policy gradient: no ratio, no clipping."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective


@policy_objective
def policy_gradient_loss(
    view: TokenView, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, −A·log π. Right for the first optimizer step after a rollout only.

    Source: REINFORCE (Williams, 1992); the loss of GPG, arXiv 2504.02546.
    """
    return -advantages * view.log_probs, {}
