"""Corrections by the ratio of trainer and engine: truncated, or with tokens beyond an interval left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def icepop_function(
    args: Any,
    *,
    pg_loss: Any,
    train_log_probs: Sequence[Any],
    rollout_log_probs: Sequence[Any],
    loss_masks: Sequence[Any],
    **_: Any,
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return (pg_loss times the ratio, 0 outside of [tis_clip_low, tis_clip]; the masks; metrics).

    Source: IcePop; slime/backends/megatron_utils/loss.py.
    """
    import torch

    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    metrics = {"tis": ratio, "tis_clipfrac": (~inside).float(), "tis_abs": (ratio - 1).abs()}
    return pg_loss * torch.where(inside, ratio, 0.0), loss_masks, metrics


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Any,
    train_log_probs: Sequence[Any],
    rollout_log_probs: Sequence[Any],
    loss_masks: Sequence[Any],
    **_: Any,
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return (pg_loss times the ratio, clamped to [tis_clip_low, tis_clip]; the masks; metrics)."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1).abs()}
    return pg_loss * weights, loss_masks, metrics


def _ratio(train_log_probs: Sequence[Any], rollout_log_probs: Sequence[Any]) -> Any:
    import torch

    return torch.exp(torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs)))
