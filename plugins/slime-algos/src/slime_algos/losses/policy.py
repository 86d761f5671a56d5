"""The clipped policy-gradient loss of PPO and GRPO, with optional entropy bonus and KL penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.estimator import check_filled
from slime_algos.kl import KL_ESTIMATORS, KlType
from slime_algos.ratio import importance_ratio, masked_log_ratio


def policy_loss(
    view: TokenView,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    entropy_coef: float = 0.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KlType = "k1",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these tokens in the clipped policy-gradient loss, and metrics.

    Per token max(−ρA, −clip(ρ, 1 − eps_clip, 1 + eps_clip_high)·A) with ρ = π/π_old; `eps_clip_high` is
    `eps_clip` when not given (clip-higher, arXiv 2503.14476, when larger); `eps_clip_c` adds the dual clip
    (arXiv 1912.09729): for A < 0 at most −eps_clip_c·A.
    Then −entropy_coef · entropy, and +kl_loss_coef · KL(π || π_ref) when `use_kl_loss`; a coefficient of 0
    only reports the KL.

    Args:
        view: reads `log_probs`, `old_log_probs`, `loss_mask`, `weights`; `entropy` and `ref_log_probs` as
            `needs` says. Entropy is reported whenever it is there.
        advantages: [T], without gradient.

    Returns:
        (scalar loss with gradient, metrics `pg_loss`, `pg_clipfrac`, `ppo_kl`, and `entropy_loss`, `kl_loss`
        where they apply: detached scalars), all reduced by `view.reduce`.

    Raises:
        TrainerError: the trainer left a field empty that `needs` names.

    Source: PPO, arXiv 1707.06347, eq. 7; slime/backends/megatron_utils/loss.py `policy_loss_function`, from
    which we differ in holding log-ratios within ±20 (see `ratio`).
    """
    wanted = _needs({"entropy_coef": entropy_coef, "use_kl_loss": use_kl_loss})
    check_filled(view, wanted, name="policy_loss")
    log_ratio = masked_log_ratio(view.log_probs, view.old_log_probs, view.loss_mask)
    token_loss, clipped = clipped_objective(
        importance_ratio(log_ratio),
        advantages,
        eps_low=eps_clip,
        eps_high=eps_clip if eps_clip_high is None else eps_clip_high,
        eps_c=eps_clip_c,
    )
    loss: Tensor = view.reduce(token_loss)
    metrics = {
        "pg_loss": loss.detach(),
        "pg_clipfrac": view.reduce(clipped.float()),
        "ppo_kl": view.reduce(-log_ratio.detach()),
    }
    if view.entropy is not None:
        entropy = view.reduce(view.entropy)
        metrics["entropy_loss"] = entropy.detach()
        if entropy_coef != 0:
            loss = loss - entropy_coef * entropy
    if use_kl_loss:
        ref_log_ratio = masked_log_ratio(view.log_probs, view.ref_log_probs, view.loss_mask)
        kl = view.reduce(KL_ESTIMATORS[kl_loss_type](ref_log_ratio))
        metrics["kl_loss"] = kl.detach()
        if kl_loss_coef != 0:
            loss = loss + kl_loss_coef * kl
    return loss, metrics


def clipped_objective(
    ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, eps_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (loss per token [T], bool [T]: where the clipped surrogate is the larger, and so counts)."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_c * advantages), loss)
    return loss, clipped > plain


def _needs(options: Mapping[str, Any]) -> frozenset[str]:
    wanted = {
        "entropy": options.get("entropy_coef", 0.0) != 0,
        "ref_log_probs": options.get("use_kl_loss", False),
    }
    return frozenset(name for name, needed in wanted.items() if needed)


policy_loss.needs = _needs  # type: ignore[attr-defined]  # mypy knows no attributes of functions
