"""Setting the columns of a view to 0 where nothing is trained on."""

from __future__ import annotations

from dataclasses import replace

import torch
from slime_core.protocols import TokenView
from torch import Tensor

_COLUMNS = (
    "weights",
    "old_log_probs",
    "log_probs",
    "entropy",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "sum_pi_squared",
    "values",
    "new_values",
    "importance",
)
"""The fields of a view that have an entry a token, but for its mask."""


def trained_only(view: TokenView) -> TokenView:
    """Return the view with 0, which has no gradient, in each column where the mask is 0.

    Tokens that are not trained on were put in by an environment: a model may find them impossible, a column may
    hold nothing for them, and weighing infinity or NaN by 0 gives NaN.
    """
    columns = {name: getattr(view, name) for name in _COLUMNS}
    return replace(view, **{name: where_trained(x, view) for name, x in columns.items() if x is not None})


def where_trained(column: Tensor, view: TokenView) -> Tensor:
    """Return a column [T], and 0 (with no gradient) where the mask is 0."""
    return torch.where(view.loss_mask > 0, column, torch.zeros_like(column))
