"""Views for tests of estimators and losses: by hand, and random ragged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from slime_core.correction import Correction
from slime_core.protocols import TokenView
from torch import Tensor

Rows = Sequence[Sequence[float]]
"""One list a sample, one number a token."""


def view_of(masks: Rows, *, rewards: Sequence[float] | None = None, **columns: Any) -> TokenView:
    """Return a float64 view of some samples.

    Args:
        masks: loss mask of each sample.
        rewards: one a sample; 0 when not given.
        columns: other fields of the view; a [T] column as `Rows` or as a flat tensor, `train_metadata` as it is. By default trained tokens
            all weigh the same, together 1, and old log-probs are 0.
    """
    lengths = torch.tensor([len(mask) for mask in masks])
    mask = _flat(masks)
    fields = {
        "weights": mask / mask.sum().clamp(min=1),
        "old_log_probs": torch.zeros_like(mask),
    } | {name: values if name == "train_metadata" else _flat(values) for name, values in columns.items()}
    return TokenView(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        sample_of_token=torch.repeat_interleave(torch.arange(len(masks)), lengths),
        loss_mask=mask,
        rewards=torch.as_tensor(rewards if rewards is not None else [0.0] * len(masks), dtype=torch.float64),
        **fields,
    )


def random_view(seed: int, *, n_samples: int = 8, longest: int = 9, masked: float = 0.3) -> TokenView:
    """Return a float64 view whose every column is random; `log_probs` and `new_values` want gradients.

    Samples differ in length, each token is masked with probability `masked`, and one sample is masked whole.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n_samples)
    masks = [(rng.random(length) >= masked).astype(float).tolist() for length in lengths]
    masks[n_samples // 2] = [0.0] * int(lengths[n_samples // 2])

    def normal(scale: float = 1.0) -> Tensor:
        return torch.as_tensor(rng.normal(size=int(lengths.sum())) * scale)

    log_probs = -normal().abs()
    near = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs")
    return view_of(
        masks,
        rewards=rng.normal(size=n_samples).tolist(),
        log_probs=log_probs.clone().requires_grad_(),
        entropy=normal().abs(),
        values=normal(),
        new_values=normal().requires_grad_(),
        sum_pi_squared=log_probs.exp().square(),
        **{name: log_probs + normal(0.5) for name in near},
    )


def corrected(view: TokenView, correction: Correction) -> TokenView:
    """Return the view that losses see under a correction whose rejected tokens count, as trainers make it."""
    kept = torch.ones_like(view.loss_mask) if correction.kept is None else correction.kept
    mask, weights = view.loss_mask * kept, view.weights * kept
    return replace(view, loss_mask=mask, weights=weights, importance=correction.importance)


def _flat(values: Any) -> Any:
    if not isinstance(values, Sequence):
        return values
    return torch.tensor([x for row in values for x in row], dtype=torch.float64)
