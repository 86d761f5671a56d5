"""Soft adaptive policy optimisation: a smooth gate in the place of clipping."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio


@policy_objective
def sapo_loss(
    view: TokenView,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take, per token, −(4/τ)·σ(τ(ρ − 1))·A, with τ = sapo_tau_pos where A > 0 and sapo_tau_neg elsewhere.

    At ρ = 1 its gradient is that of the policy gradient; it fades as ρ moves away, faster for larger τ.

    Source: SAPO, arXiv 2511.20347, eq. 5 and 6.
    """
    pos, neg = advantages.new_tensor(sapo_tau_pos), advantages.new_tensor(sapo_tau_neg)
    tau = torch.where(advantages > 0, pos, neg)
    gate = torch.sigmoid(tau * (importance_ratio(log_ratio) - 1)) * 4 / tau
    return -gate * advantages, {}
