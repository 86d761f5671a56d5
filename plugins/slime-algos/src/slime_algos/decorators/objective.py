"""`policy_objective`: what every policy loss has besides its own objective.

An objective is written as `objective(view, log_ratio, advantages, *, its own options)` and decorated. It then takes
these options too:

- `entropy_coef`: −entropy_coef · entropy; entropy is reported whenever it is there;
- `use_kl_loss`: +kl_loss_coef · KL(π || π_ref), estimated by `kl_loss_type`; a coefficient of 0 only reports it.
  `use_unbiased_kl` weighs it by π/π_old (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), whose gradient is that of
  the divergence itself where π_old is no longer π; `kl_straight_through` keeps the estimate's value and takes the
  gradient of k2, which is that of the divergence where π_old is π;
- `use_opsm`: off-policy sequence masking (the same, section 3.1): no loss from samples of negative advantage that
  have moved by more than `opsm_delta` nats a token from π_old;
- `staleness_metrics`: reports of `ppo_kl` and each metric of the objective, as `NAME_stale`, the part that tokens of older
  weights than the step trains add to it.

An objective sees neither what a view's columns hold where the mask is 0, nor importance weights: what it returns for a
token, penalties included, is multiplied by the token's weight afterwards, and what it selects by advantages it selects
by those that the estimator gave. One whose ratio is a product over the sample's tokens says so, see `policy_objective`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast, overload

from slime_core.protocols import LossFn, TokenView
from torch import Tensor

from slime_algos.decorators.filled import check_filled
from slime_algos.decorators.options import joined_signature, options_of_section
from slime_algos.terms.kl import KL_ESTIMATORS, LOW_VAR_LIMIT, KlType, k2
from slime_algos.terms.masked import trained_only, where_trained
from slime_algos.terms.ratio import importance_ratio, masked_log_ratio
from slime_algos.terms.sample_sums import sample_means

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(view, log_ratio [T], advantages [T], *, options) -> (loss [T], metrics: name -> [T] without gradient).

`log_ratio` is log π − log π_old, with gradient. All columns are 0, without gradient, where the mask is 0.
"""


@overload
def policy_objective(objective: Objective, /) -> LossFn: ...


@overload
def policy_objective(*, product: bool) -> Callable[[Objective], LossFn]: ...


def policy_objective(
    objective: Objective | None = None, /, *, product: bool = False
) -> LossFn | Callable[[Objective], LossFn]:
    """Make a policy loss of an objective a token: weighed, reduced by `view.reduce`, with entropy, KL and masking.

    Args:
        objective: what is decorated.
        product: its ratio is the geometric mean of the ratios of the sample's tokens, and so is its importance weight.
    """
    if objective is None:
        return functools.partial(_made, product=product)
    return _made(objective, product=False)


def _made(objective: Objective, *, product: bool) -> LossFn:
    @functools.wraps(objective)
    def loss(view: TokenView, advantages: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        check_filled(view, _needs(options), name=objective.__name__)
        view, advantages = trained_only(view), where_trained(advantages, view)
        if product and view.importance is not None:
            view = replace(view, importance=sample_importance(view))
        return _loss(objective, view, advantages, **options)

    made = cast(Any, loss)
    made.__signature__ = joined_signature(objective, _loss, given="log_ratio")
    made.options_from = options_of_section(_loss)
    made.needs = _needs
    made.weighs_importance = True
    return cast(LossFn, made)


def _needs(options: Mapping[str, Any]) -> frozenset[str]:
    wanted = {
        "entropy": options.get("entropy_coef", 0.0) != 0,
        "ref_log_probs": options.get("use_kl_loss", False),
        "old_log_probs": options.get("use_opsm", False),
        "staleness": options.get("staleness_metrics", False),
    }
    return frozenset(name for name, needed in wanted.items() if needed)


def _loss(
    objective: Objective,
    /,
    view: TokenView,
    advantages: Tensor,
    *,
    entropy_coef: float = 0.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KlType = "k1",
    use_unbiased_kl: bool = False,
    kl_straight_through: bool = False,
    use_opsm: bool = False,
    opsm_delta: float = 1e-4,
    staleness_metrics: bool = False,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    log_ratio = masked_log_ratio(view.log_probs, view.old_log_probs, view.loss_mask)
    token_loss, metrics = objective(replace(view, importance=None), log_ratio, advantages, **options)
    token_loss = where_trained(token_loss, view)
    if view.importance is not None:
        token_loss = token_loss * view.importance
        metrics = metrics | {"ois": importance_ratio(log_ratio.detach())}
    if use_opsm:
        stale = off_policy_samples(view, log_ratio, advantages, delta=opsm_delta)
        token_loss, metrics = token_loss * ~stale, metrics | {"opsm_clipfrac": stale}
    total: Tensor = view.reduce(token_loss)
    reported = {"pg_loss": total.detach(), "ppo_kl": view.reduce(-log_ratio.detach())}
    columns = {name: where_trained(value.to(token_loss.dtype), view) for name, value in metrics.items()}
    reported |= {name: view.reduce(column) for name, column in columns.items()}
    if staleness_metrics:
        parts = columns | {"ppo_kl": -log_ratio.detach()}
        reported |= {f"{name}_stale": view.reduce(x * (view.staleness > 0)) for name, x in parts.items()}
    if view.entropy is not None:
        entropy = view.reduce(view.entropy)
        reported["entropy_loss"] = entropy.detach()
        total = total - entropy_coef * entropy if entropy_coef != 0 else total
    if use_kl_loss:
        kl = view.reduce(_kl(view, log_ratio, kl_loss_type, use_unbiased_kl, kl_straight_through))
        reported["kl_loss"] = kl.detach()
        total = total + kl_loss_coef * kl if kl_loss_coef != 0 else total
    return total, reported


def off_policy_samples(view: TokenView, log_ratio: Tensor, advantages: Tensor, *, delta: float) -> Tensor:
    """Return bool [T]: tokens of negative advantage in samples whose mean of log π_old − log π exceeds `delta`."""
    moved = sample_means(-log_ratio.detach(), view.loss_mask, view.offsets)
    return (advantages < 0) & (moved > delta)[view.sample_of_token]


def sample_importance(view: TokenView) -> Tensor:
    """Return the geometric mean of a sample's importance weights, for each of its tokens [T].

    A weight of 0 counts as 1e-10, as in verl's `compute_policy_loss_geo_mean`: one token that IcePop masks lowers its
    sample's weight, and does not end it.
    """
    logs = where_trained((view.importance + 1e-10).log(), view)
    return sample_means(logs, view.loss_mask, view.offsets).exp()[view.sample_of_token]


def _kl(
    view: TokenView, log_ratio: Tensor, kl_type: KlType, unbiased: bool, straight_through: bool
) -> Tensor:
    x = masked_log_ratio(view.log_probs, view.ref_log_probs, view.loss_mask)
    # As in the reference system, `low_var_kl` is cut off after it was weighed.
    cut_off_later = unbiased and kl_type == "low_var_kl"
    kl = KL_ESTIMATORS["k3" if cut_off_later else kl_type](x)
    if straight_through:
        kl = kl.detach() + k2(x) - k2(x).detach()
    if unbiased:
        kl = importance_ratio(log_ratio) * kl
    return kl.clamp(max=LOW_VAR_LIMIT) if cut_off_later else kl
