"""`estimator`: what every advantage estimator can do besides its own way of giving credit.

An estimator is written as `credit(view, kl, *, its own options)` and decorated. It then takes these options too,
which apply in this order:

- `kl_coef`: −kl_coef · KL(π_old || π_ref) of each token in the reward, estimated by `kl_loss_type`; with `kl_target`
  the coefficient is where the first batch begins, and changes from batch to batch, see `adaptive_kl`;
- `use_opd`: on-policy distillation, A_t − opd_kl_coef · (log π_old − log π_teacher);
- `normalize_advantages`: whitening over the trained tokens of the batch;
- `use_tis`, `use_rs`: importance weights and rejection against the engine's policy, see `correction`, and
  `max_token_staleness`: rejection of tokens of older weights. They change no advantage: they are returned as a
  `Correction`, which the trainer applies to the losses. `staleness_metrics` reports them for stale tokens apart.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import torch
from slime_core.protocols import AdvantageEstimator, TokenView
from slime_core.protocols.correction import Correction
from torch import Tensor

from slime_algos.decorators.filled import check_filled
from slime_algos.decorators.options import joined_signature, options_of_section
from slime_algos.terms.adaptive_kl import next_kl_coef
from slime_algos.terms.correction import RatioLevel, importance_weights, kept, kept_fresh
from slime_algos.terms.kl import KL_ESTIMATORS, KlType
from slime_algos.terms.masked import trained_only
from slime_algos.terms.ratio import masked_log_ratio
from slime_algos.terms.sample_sums import sample_sums
from slime_algos.terms.whitening import whiten

Credit = Callable[..., tuple[Tensor, Tensor]]
"""(view, kl [T], *, options) -> (advantages [T], returns [T]); `kl` is kl_coef · KL, 0 where the mask is.

One that takes `importance` after `kl` is given the importance weights [T], by which the loss will be multiplied, or
None without `use_tis`. All columns of the view are 0 where the mask is.
"""

_READS = {
    "kl_coef": {"old_log_probs", "ref_log_probs"},
    "use_opd": {"old_log_probs", "teacher_log_probs"},
    "use_tis": {"old_log_probs", "rollout_log_probs"},
    "use_rs": {"old_log_probs", "rollout_log_probs"},
    "staleness_metrics": {"staleness"},
}


def estimator(
    *,
    reward_transform: str,
    loss: str = "policy_loss",
    reads: Iterable[str] = (),
    reward_parts: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
) -> Callable[[Credit], AdvantageEstimator]:
    """Make an `AdvantageEstimator` of a function that gives credit.

    Args:
        reward_transform: reward transform that it wants.
        loss: loss that goes with it, where `--loss-type` names none.
        reads: optional fields of the view that the function itself reads.
        reward_parts: (options) -> names of the parts of rewards that the function reads.
    """
    own = frozenset(reads) | ({"reward_parts"} if reward_parts else set())

    def needs(options: Mapping[str, Any]) -> frozenset[str]:
        bounded = {"staleness"} if options.get("max_token_staleness") is not None else set()
        return own.union(bounded, *(fields for option, fields in _READS.items() if options.get(option)))

    def decorate(credit: Credit) -> AdvantageEstimator:
        @functools.wraps(credit)
        def estimate(view: TokenView, **options: Any) -> tuple[Any, ...]:
            check_filled(view, needs(options), name=credit.__name__)
            return _estimate(credit, trained_only(view), **options)

        made = cast(Any, estimate)
        made.__signature__ = joined_signature(credit, _estimate, given="kl")
        made.options_from = options_of_section(_estimate)
        made.reward_transform, made.loss, made.needs = reward_transform, loss, needs
        made.gives_importance = _gives_importance
        if reward_parts is not None:
            made.reward_parts = reward_parts
        return cast(AdvantageEstimator, made)

    return decorate


def _estimate(
    credit: Credit,
    /,
    view: TokenView,
    *,
    kl_coef: float = 0.0,
    kl_loss_type: KlType = "k1",
    kl_target: float | None = None,
    kl_horizon: float = 10_000.0,
    state: Mapping[str, float] | None = None,
    use_opd: bool = False,
    opd_kl_coef: float = 1.0,
    normalize_advantages: bool = False,
    use_tis: bool = False,
    tis_level: RatioLevel = "token",
    tis_mode: Literal["clip", "mask"] = "clip",
    tis_clip_low: float = 0.0,
    tis_clip: float = 2.0,
    tis_batch_normalize: bool = False,
    tis_metric: Literal["ratio", "weight"] = "ratio",
    use_rs: bool = False,
    rs_level: RatioLevel = "token",
    rs_lower_bound: float = 0.5,
    rs_upper_bound: float = 2.0,
    rs_veto_threshold: float = 0.0,
    rs_count_rejected: bool = True,
    max_token_staleness: int | None = None,
    staleness_metrics: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    metrics: dict[str, Any] = {}
    penalty = torch.zeros_like(view.loss_mask)
    if kl_coef != 0:
        kl = _divergence(view, kl_loss_type)
        if kl_target is not None and state:
            kl_coef = state["kl_coef"]
        metrics = {"reward_kl": _mean_of_samples(kl, view), "kl_coef": kl_coef}
        penalty = kl_coef * kl
    weights: Tensor | None = None
    if use_tis:
        weights, found = importance_weights(
            view,
            level=tis_level,
            mode=tis_mode,
            low=tis_clip_low,
            high=tis_clip,
            batch_normalize=tis_batch_normalize,
            reported=tis_metric,
            by_staleness=staleness_metrics,
        )
        metrics |= found
    bounds = {"level": rs_level, "low": rs_lower_bound, "high": rs_upper_bound, "veto": rs_veto_threshold}
    keep, found = _kept(view, bounds if use_rs else None, max_token_staleness, by_staleness=staleness_metrics)
    metrics |= found
    counted = view.loss_mask if keep is None or rs_count_rejected else view.loss_mask * keep
    if "importance" in inspect.signature(credit).parameters:
        options["importance"] = weights
    advantages, returns = credit(view, penalty, **options)
    if use_opd:
        log_ratio = masked_log_ratio(view.old_log_probs, view.teacher_log_probs, view.loss_mask)
        advantages = advantages - opd_kl_coef * log_ratio
        metrics["opd_reverse_kl"] = _mean_of_samples(log_ratio, view)
    if normalize_advantages:
        advantages = whiten(advantages, counted)
    state_after: dict[str, float] = {}
    if kl_coef != 0 and kl_target is not None:
        kl_now, n_samples = float(metrics["reward_kl"]), len(view.rewards)
        after = next_kl_coef(kl_coef, kl_now, target=kl_target, horizon=kl_horizon, n_samples=n_samples)
        state_after = {"kl_coef": after}
    if weights is None and keep is None:
        more: tuple[Any, ...] = (metrics, state_after) if state_after else (metrics,) if metrics else ()
        return advantages, returns, *more
    correction = Correction(importance=weights, kept=keep, count_rejected=rs_count_rejected)
    return advantages, returns, metrics, state_after, correction


def _kept(
    view: TokenView, bounds: Mapping[str, Any] | None, most_stale: int | None, *, by_staleness: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return (which tokens are kept [T], None for all; metrics): within the bounds on ratios, and not too old."""
    keep: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    if bounds is not None:
        keep, metrics = kept(view, **bounds, by_staleness=by_staleness)
    if most_stale is not None:
        fresh, found = kept_fresh(view, most=most_stale)
        keep, metrics = fresh if keep is None else keep & fresh, metrics | found
    return keep, metrics


def _gives_importance(options: Mapping[str, Any]) -> bool:
    return bool(options.get("use_tis"))


def _divergence(view: TokenView, kl_type: KlType) -> Tensor:
    """Return the estimate of KL(π_old || π_ref) at each token [T], 0 where the mask is."""
    return KL_ESTIMATORS[kl_type](masked_log_ratio(view.old_log_probs, view.ref_log_probs, view.loss_mask))


def _mean_of_samples(values: Tensor, view: TokenView) -> Tensor:
    """Return the mean over samples of the mean over their trained tokens; NaN where there are none."""
    counts = sample_sums(view.loss_mask, view.offsets)
    having = counts > 0
    return (sample_sums(values * view.loss_mask, view.offsets)[having] / counts[having]).mean()
