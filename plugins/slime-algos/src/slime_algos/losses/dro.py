"""Direct reward optimisation: the policy gradient with a quadratic price on leaving the old policy."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective


@policy_objective
def dro_loss(
    view: TokenView, log_ratio: Tensor, advantages: Tensor, *, dro_beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, −A·log π + dro_beta/2 · (log π − log π_old)².

    Source: DRO, arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599, eq. 3; verl `compute_policy_loss_dro`, token by
    token as here.
    """
    return -advantages * view.log_probs + dro_beta / 2 * log_ratio.square(), {}
