"""Formulae of losses, under the names of `slime.utils.ppo_utils`: those of slime-algos. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from slime_algos.losses.policy import clipped_objective
from slime_algos.terms.kl import KL_ESTIMATORS, LOW_VAR_LIMIT
from slime_core.errors import PluginError


def compute_approx_kl(
    log_probs: torch.Tensor, log_probs_base: torch.Tensor, kl_loss_type: str, importance_ratio: Any = None
) -> torch.Tensor:
    """Return the estimate of the KL divergence at each token.

    Raises:
        PluginError: there is no estimator of the name.
    """
    if kl_loss_type not in KL_ESTIMATORS:
        raise PluginError(f"kl_loss_type: found {kl_loss_type!r}; wanted one of {', '.join(KL_ESTIMATORS)}")
    x = log_probs.float() - log_probs_base.float()
    is_cut_off_later = importance_ratio is not None and kl_loss_type == "low_var_kl"
    kl: torch.Tensor = KL_ESTIMATORS["k3" if is_cut_off_later else kl_loss_type](x)
    weighed = kl if importance_ratio is None else kl * importance_ratio
    return weighed.clamp(max=LOW_VAR_LIMIT) if is_cut_off_later else weighed


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, 1.0 where it is clipped) of each token; `ppo_kl` is old minus new log-probs. See `slime_algos.losses.policy`."""
    loss, told = clipped_objective(
        torch.exp(-ppo_kl),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )
    return loss, told["pg_clipfrac"].float()


def get_grpo_returns(rewards: Sequence[float], kl: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each token its sample's reward: a list of tensors, one a sample, as `kl` is."""
    return [torch.full_like(tokens, float(reward)) for tokens, reward in zip(kl, rewards, strict=True)]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float], kl: Sequence[torch.Tensor], loss_masks: Any, kl_coef: float
) -> list[torch.Tensor]:
    """Return for each token its sample's reward less its own penalty: a list of tensors, one a sample."""
    returns = get_grpo_returns(rewards, kl)
    return [each - kl_coef * tokens for each, tokens in zip(returns, kl, strict=True)]


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return old minus new log-probs, of each token its sample's mean over trained tokens [T]."""
    columns = zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True)
    means = [
        (((old - new) * mask).sum() / mask.sum().clamp(min=1)).expand_as(local)
        for new, old, local, mask in columns
    ]
    return torch.cat(means)
