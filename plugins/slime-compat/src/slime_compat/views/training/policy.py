"""The default losses as functions that a loss of a user's own may call. Imports torch, when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_compat.views.training.logits import get_log_probs_and_entropy


def lacking_in_default_loss(settings: Mapping[str, Any]) -> str | None:
    """Return the first of a run's settings that the reference's `policy_loss_function` heeds, and the one here does not; None without."""
    estimator = settings.get("advantage_estimator")
    if estimator in ("gspo", "cispo"):
        return f"--advantage-estimator {estimator}"
    lacking = (name for name in ("use_opsm", "use_unbiased_kl") if settings.get(name))
    return next((f"--{name.replace('_', '-')}" for name in lacking), None)


def policy_loss_function(
    args: Any,
    batch: Mapping[str, Any],
    logits: Any,
    sum_of_sample_mean: Callable[[Any], Any],
) -> tuple[Any, dict[str, Any]]:
    """Return (PPO's clipped loss, its metrics), with the terms of `--use-kl-loss` and `--entropy-coef`; of a batch as custom losses get it.

    A run with `lacking_in_default_loss` is refused before it starts.
    """
    import torch

    from slime_compat.views.training.formulae import compute_approx_kl, compute_policy_loss

    has_entropy = bool(args.entropy_coef)
    _, told = get_log_probs_and_entropy(logits, args=args, with_entropy=has_entropy, **_tokens(batch))
    log_probs, old = torch.cat(told["log_probs"]), torch.cat(list(batch["log_probs"]))
    ppo_kl = old - log_probs
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    losses, clipped = compute_policy_loss(
        ppo_kl, torch.cat(list(batch["advantages"])), args.eps_clip, high, args.eps_clip_c
    )
    pg_loss = sum_of_sample_mean(losses)
    loss = pg_loss
    metrics = {
        "pg_loss": pg_loss,
        "pg_clipfrac": sum_of_sample_mean(clipped),
        "ppo_kl": sum_of_sample_mean(ppo_kl),
    }
    if has_entropy:
        metrics["entropy_loss"] = sum_of_sample_mean(torch.cat(told["entropy"]))
        loss = loss - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        reference = torch.cat(list(batch["ref_log_probs"]))
        metrics["kl_loss"] = sum_of_sample_mean(compute_approx_kl(log_probs, reference, args.kl_loss_type))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}


def sft_loss_function(
    args: Any,
    batch: Mapping[str, Any],
    logits: Any,
    sum_of_sample_mean: Callable[[Any], Any],
) -> tuple[Any, dict[str, Any]]:
    """Return (minus the log-probs, reduced; metrics); of a batch as custom losses get it."""
    import torch

    _, told = get_log_probs_and_entropy(logits, args=args, **_tokens(batch))
    loss = sum_of_sample_mean(-torch.cat(told["log_probs"]))
    return loss, {"loss": loss.detach()}


def _tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a batch says of its tokens."""
    return {name: batch.get(name) for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
