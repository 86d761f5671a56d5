"""Off-policy correction: the engine sampled from μ, the trainer's old policy is π_old.

Importance weights w = π_old/μ (truncated importance sampling, IcePop, masked importance sampling, decoupled PPO)
and rejection of tokens and samples whose ratio is out of bounds. Both are worked out once, over the whole batch, and
handed to the trainer as a `slime_core.protocols.correction.Correction`. Weights multiply what a policy loss is a token, its
penalties included; rejected tokens leave the mask. Neither touches an advantage: not every objective is homogeneous
in it (DRO and KL-Cov add to it), and Clip-Cov and KL-Cov select tokens by it.

The forms of the field, by `tis_level`, `tis_mode`, `tis_clip_low`, `tis_clip`:

- TIS (fengyao.notion.site/off-policy-rl): token, clip, 0, 2; sequence-level TIS: sequence, clip, 0, 2;
- IcePop (arXiv 2510.18855): token, mask, 0.5, 5;
- MIS: sequence or geometric, mask;
- decoupled PPO (arXiv 2505.24298): token, clip, 0, inf, with π_old its proximal policy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.terms.ratio import importance_ratio, masked_log_ratio
from slime_algos.terms.sample_sums import sample_means, sample_sums

RatioLevel = Literal["token", "sequence", "geometric"]


def ratio_at(log_ratio: Tensor, level: RatioLevel, view: TokenView) -> Tensor:
    """Return each token's ratio [T]: its own, its sample's product, or its sample's geometric mean.

    Args:
        log_ratio: [T] nats, 0 where the mask is.
        level: `token`, `sequence` (the product) or `geometric`.
        view: reads `offsets`, `sample_of_token`, `loss_mask`.
    """
    if level == "sequence":
        log_ratio = sample_sums(log_ratio, view.offsets)[view.sample_of_token]
    elif level == "geometric":
        log_ratio = sample_means(log_ratio, view.loss_mask, view.offsets)[view.sample_of_token]
    return importance_ratio(log_ratio)


def importance_weights(
    view: TokenView,
    *,
    level: RatioLevel,
    mode: Literal["clip", "mask"],
    low: float,
    high: float,
    batch_normalize: bool,
    reported: Literal["ratio", "weight"] = "ratio",
    by_staleness: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (w [T], metrics): the ratio π_old/μ at a level, held within [low, high] or 0 outside.

    `batch_normalize` divides by the mean weight of the batch's trained tokens.

    Args:
        view: reads `old_log_probs`, `rollout_log_probs`, `loss_mask`, `offsets`, `sample_of_token`.
        level: see `ratio_at`.
        mode: `clip` to the bounds, or `mask`: 0 outside them.
        low: lower bound; 0 for none.
        high: upper bound.
        batch_normalize: make the mean weight 1.
        reported: what the metric `tis` is the mean of: the ratio, as it was (the reference system), or the weight
            that it became, before normalisation (verl, TRL).
        by_staleness: whether metrics are also given of stale tokens apart from others, see `means`.

    Returns:
        Metrics over trained tokens: `tis` (see `reported`), `tis_abs` (mean distance of the ratio from 1),
        `tis_clipfrac` (share out of bounds), `tis_ess` (effective share of the tokens, (Σw)²/(nΣw²)).

    Source: slime/backends/megatron_utils/loss.py `vanilla_tis_function`, `icepop_function`; verl
    `compute_rollout_correction_weights`, whose `sequence` normalisation averages over samples, not tokens.
    """
    log_ratio = masked_log_ratio(view.old_log_probs, view.rollout_log_probs, view.loss_mask)
    ratio = ratio_at(log_ratio, level, view)
    outside = (ratio < low) | (ratio > high)
    weights = (
        ratio.clamp(low, high) if mode == "clip" else torch.where(outside, torch.zeros_like(ratio), ratio)
    )
    mean = _mean(weights, view.loss_mask)
    columns = {
        "tis": weights if reported == "weight" else ratio,
        "tis_abs": (ratio - 1).abs(),
        "tis_clipfrac": outside.to(ratio.dtype),
    }
    metrics = means(columns, view, by_staleness=by_staleness) | {
        "tis_ess": mean.square() / _mean(weights.square(), view.loss_mask).clamp(min=1e-30),
    }
    if batch_normalize:
        weights = torch.where(mean > 0, weights / mean.clamp(min=1e-30), weights)
    return weights, metrics


def kept(
    view: TokenView,
    *,
    level: RatioLevel,
    low: float,
    high: float,
    veto: float,
    by_staleness: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (whether each token is kept, bool [T], metrics `rs_rejected`: share of tokens that are not).

    A token is kept when its ratio π_old/μ at `level` is within [low, high], and no token of its sample has a
    ratio below `veto`.

    Source: examples/train_infer_mismatch_helper of the reference system; verl
    `compute_rollout_rejection_mask`, `token_k1`, `seq_sum_k1` and `seq_mean_k1`, which bounds the inverse.
    """
    log_ratio = masked_log_ratio(view.old_log_probs, view.rollout_log_probs, view.loss_mask)
    ratio = ratio_at(log_ratio, level, view)
    keep = (ratio >= low) & (ratio <= high)
    if veto > 0:
        catastrophic = (log_ratio < math.log(veto)).to(ratio.dtype)  # `ratio` has a least value
        keep = keep & (sample_sums(catastrophic, view.offsets) == 0)[view.sample_of_token]
    return keep, means({"rs_rejected": (~keep).to(ratio.dtype)}, view, by_staleness=by_staleness)


def kept_fresh(view: TokenView, *, most: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (whether each token is at most `most` steps old, bool [T], metrics `stale_rejected`: share that is older).

    Source: `--mask-offpolicy-in-partial-rollout` of the reference system, which leaves out of the loss what earlier weights
    generated of a response, here with a bound; `most` of 0 is the same where each step generates what it trains on.
    """
    keep = view.staleness <= most
    return keep, means({"stale_rejected": (~keep).to(view.loss_mask.dtype)}, view)


def means(columns: dict[str, Tensor], view: TokenView, *, by_staleness: bool = False) -> dict[str, Tensor]:
    """Return the mean of each column [T] over trained tokens, under its name.

    With `by_staleness`, where there are such tokens: the mean over those of older weights than the step trains as
    `NAME_stale`, and over the others as `NAME_on_policy`. Reads `loss_mask` and then `staleness`, over the whole batch.
    """
    mask = view.loss_mask
    found = {name: _mean(column, mask) for name, column in columns.items()}
    if by_staleness:
        stale = (view.staleness > 0).to(mask.dtype)
        for kind, share in (("stale", stale), ("on_policy", 1 - stale)):
            if (mask * share).any():
                found |= {f"{name}_{kind}": _mean(column, mask * share) for name, column in columns.items()}
    return found


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
