"""The critic's loss: squared distance of the values from the returns, clipped around the old values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.filled import check_filled
from slime_algos.terms.masked import trained_only, where_trained


def value_loss(
    view: TokenView,
    returns: Tensor,
    *,
    value_clip: float | None = 0.2,
    value_loss_scale: float = 1.0,
    value_clipfrac: Literal["moved", "larger"] = "moved",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these tokens in the clipped value loss, and metrics.

    Per token scale · max((V − G)², (V_clip − G)²) with V_clip = V_old + clip(V − V_old, ±value_clip).

    Args:
        view: reads `new_values` (V, with gradient), `values` (V_old), `loss_mask`, `weights`.
        returns: [T] G, as the estimator returned them, without gradient.
        value_clip: how far a value may move before its loss is clipped; None does not clip.
        value_loss_scale: 1 as in the reference system; 0.5 as in PPO, verl and OpenRLHF.
        value_clipfrac: which tokens the metric of that name counts: `moved`, those whose value has moved by more than
            `value_clip`, as in the reference system; `larger`, those whose clipped loss is the larger, as in verl.

    Returns:
        (scalar loss with gradient, metrics `value_loss`, `value_clipfrac`: detached scalars), all reduced by
        `view.reduce`.

    Raises:
        TrainerError: the trainer left `values` or `new_values` empty.

    Source: slime/backends/megatron_utils/loss.py `value_loss_function`; verl `compute_value_loss`.
    """
    check_filled(view, ("values", "new_values"), name="value_loss")
    view, returns = trained_only(view), where_trained(returns, view)
    values, old = view.new_values, view.values
    plain = (values - returns).square()
    if value_clip is None:
        token_loss, clipped = plain, torch.zeros_like(plain, dtype=torch.bool)
    else:
        around = (old + (values - old).clamp(-value_clip, value_clip) - returns).square()
        token_loss = torch.maximum(plain, around)
        clipped = (values - old).abs() > value_clip
        if value_clipfrac == "larger":  # where no value moved as far, rounding may say so
            clipped = clipped & (around > plain)
    loss: Tensor = value_loss_scale * view.reduce(token_loss)
    return loss, {
        "value_loss": loss.detach(),
        "value_clipfrac": view.reduce(clipped.to(view.weights.dtype)),
    }


def _needs(_options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset({"values", "new_values"})


value_loss.needs = _needs  # type: ignore[attr-defined]  # mypy knows no attributes of functions
