"""Reducers: the share of each response token in the loss of its optimizer step. numpy only.

Both count a fully masked sample: it adds nothing to the sum and still 1 to what the sum is divided by, as in
the reference (slime/backends/megatron_utils/cp_utils.py `get_sum_of_sample_mean`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from slime_core.protocols import ReductionView


def sample_mean(view: ReductionView) -> NDArray[np.float64]:
    """Weigh every execution the same: m_t / max(1, M_e) / E, for a token of execution e.

    M_e is the number of trained tokens of all samples of the execution in the optimizer step, E the number of
    executions. With one sample an execution this is the mean over samples of the mean over their tokens.
    """
    executions, execution = np.unique(view.rollout_ids, return_inverse=True)
    execution_of_token = execution[view.sample_of_token]
    trained = _sum_by(execution_of_token, view.loss_mask, len(executions))
    share: NDArray[np.float64] = 1 / np.maximum(trained, 1) / len(executions)
    return view.loss_mask * share[execution_of_token]


def token_mean(view: ReductionView) -> NDArray[np.float64]:
    """Weigh every trained token the same: m_t / Σ_i max(1, M_i), with M_i the trained tokens of sample i."""
    trained = _sum_by(view.sample_of_token, view.loss_mask, len(view.rollout_ids))
    n_tokens: np.float64 = np.maximum(trained, 1).sum()
    return view.loss_mask / n_tokens


def _sum_by(bins: NDArray[np.integer], values: NDArray[np.float64], n_bins: int) -> NDArray[np.float64]:
    return np.asarray(np.bincount(bins, weights=values, minlength=n_bins), dtype=np.float64)
