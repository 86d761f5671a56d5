"""`estimator`: what every advantage estimator can do besides its own way of giving credit.

An estimator is written as `credit(view, kl, *, its own options)` and decorated; it then takes these options too:

- `kl_coef`: −kl_coef · KL(π_old || π_ref) of each token in the reward, estimated by `kl_loss_type`;
- `use_opd`: on-policy distillation, A_t − opd_kl_coef · (log π_old − log π_teacher);
- `normalize_advantages`: whitening over the trained tokens of the batch, last.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from slime_core.errors import TrainerError
from slime_core.protocols import AdvantageEstimator, TokenView
from torch import Tensor

from slime_algos.kl import KL_ESTIMATORS, KlType
from slime_algos.ratio import masked_log_ratio
from slime_algos.whitening import whiten

Credit = Callable[..., tuple[Tensor, Tensor]]
"""(view, kl [T], *, options) -> (advantages [T], returns [T]); `kl` is kl_coef · KL, 0 where the mask is."""


def estimator(*, reward_transform: str, reads: Iterable[str] = ()) -> Callable[[Credit], AdvantageEstimator]:
    """Make an `AdvantageEstimator` of a function that gives credit.

    Args:
        reward_transform: reward transform that it wants.
        reads: optional fields of the view that the function itself reads.
    """
    own = frozenset(reads)

    def decorate(credit: Credit) -> AdvantageEstimator:
        def estimate(
            view: TokenView,
            *,
            kl_coef: float = 0.0,
            kl_loss_type: KlType = "k1",
            use_opd: bool = False,
            opd_kl_coef: float = 1.0,
            normalize_advantages: bool = False,
            **options: Any,
        ) -> tuple[Tensor, Tensor]:
            check_filled(view, needs({"kl_coef": kl_coef, "use_opd": use_opd}), name=credit.__name__)
            advantages, returns = credit(view, _penalty(view, kl_coef, kl_loss_type), **options)
            if use_opd:
                log_ratio = masked_log_ratio(view.old_log_probs, view.teacher_log_probs, view.loss_mask)
                advantages = advantages - opd_kl_coef * log_ratio
            if normalize_advantages:
                advantages = whiten(advantages, view.loss_mask)
            return advantages, returns

        def needs(options: Mapping[str, Any]) -> frozenset[str]:
            found = own
            if options.get("kl_coef", 0.0) != 0:
                found |= {"old_log_probs", "ref_log_probs"}
            if options.get("use_opd", False):
                found |= {"old_log_probs", "teacher_log_probs"}
            return found

        made = cast(Any, functools.wraps(credit)(estimate))
        made.__signature__ = _signature(credit, estimate)
        made.reward_transform = reward_transform
        made.needs = needs
        return cast(AdvantageEstimator, made)

    return decorate


def check_filled(view: TokenView, names: Iterable[str], *, name: str) -> None:
    """Raise if the trainer left a field of the view empty.

    Raises:
        TrainerError: names the fields, and the estimator or loss that wants them.
    """
    missing = sorted(field for field in names if getattr(view, field) is None)
    if missing:
        raise TrainerError(
            f"{name}: TokenView has no {', '.join(missing)}, which its options ask for; "
            "the trainer must fill what `slime_core.protocols.needs_of` names"
        )


def _penalty(view: TokenView, kl_coef: float, kl_type: KlType) -> Tensor:
    if kl_coef == 0:
        return torch.zeros_like(view.loss_mask)
    log_ratio = masked_log_ratio(view.old_log_probs, view.ref_log_probs, view.loss_mask)
    return kl_coef * KL_ESTIMATORS[kl_type](log_ratio)


def _signature(credit: Credit, estimate: Callable[..., Any]) -> inspect.Signature:
    """Return `(view, *, the credit function's options, those of every estimator)`."""
    (view, _, *own) = inspect.signature(credit).parameters.values()
    common = [
        p
        for p in inspect.signature(estimate, follow_wrapped=False).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    return inspect.Signature([view, *own, *common])
