"""Reducers: the share of each response token in the loss of its optimizer step. numpy only.

All count executions: siblings of one execution share its place in the mean. A fully masked execution adds nothing
to the sum and still 1 to what the sum is divided by, as in the reference (slime/backends/megatron_utils/cp_utils.py
`get_sum_of_sample_mean`) and TRL; `skip_masked` leaves it out of the count, as verl and OpenRLHF do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from slime_core.protocols import ReductionView


def sample_mean(view: ReductionView, *, skip_masked: bool = False) -> NDArray[np.float64]:
    """Weigh every execution the same: m_t / max(1, M_e) / E, for a token of execution e.

    M_e is the number of trained tokens of all samples of the execution in the optimizer step, E the number of
    executions. With one sample an execution this is the mean over samples of the mean over their tokens.
    """
    execution, trained = _executions(view)
    share = 1 / np.maximum(trained, 1) / _count(trained, skip_masked=skip_masked)
    return view.loss_mask * share[execution]


def token_mean(view: ReductionView, *, skip_masked: bool = False) -> NDArray[np.float64]:
    """Weigh every trained token the same: m_t / Σ_i max(1, M_i), with M_i the trained tokens of sample i."""
    trained = _sum_by(view.sample_of_token, view.loss_mask, len(view.rollout_ids))
    n_tokens = max(1.0, float(trained.sum() if skip_masked else np.maximum(trained, 1).sum()))
    return view.loss_mask / n_tokens


def sequence_sum(view: ReductionView, *, skip_masked: bool = False) -> NDArray[np.float64]:
    """Weigh every trained token by 1/E: the mean over executions of the sum over their tokens.

    verl's `seq-mean-token-sum`; what the policy gradient of whole sequences says.
    """
    _, trained = _executions(view)
    return view.loss_mask / _count(trained, skip_masked=skip_masked)


def constant(
    view: ReductionView, *, loss_scale_factor: float, skip_masked: bool = False
) -> NDArray[np.float64]:
    """Weigh every trained token by 1/(E · loss_scale_factor), whatever the length of its sample.

    The factor is a constant of the run, usually the most tokens of a response.

    Raises:
        ValueError: the factor is not a positive number.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2; verl's `seq-mean-token-sum-norm`; TRL's `dr_grpo`.
    """
    if not 0 < loss_scale_factor < np.inf:
        raise ValueError(f"constant: loss_scale_factor is {loss_scale_factor}; wanted a positive number")
    return sequence_sum(view, skip_masked=skip_masked) / loss_scale_factor


def _executions(view: ReductionView) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return (execution of each token [T], trained tokens of each execution [E])."""
    executions, execution = np.unique(view.rollout_ids, return_inverse=True)
    execution_of_token = execution[view.sample_of_token]
    return execution_of_token, _sum_by(execution_of_token, view.loss_mask, len(executions))


def _count(trained: NDArray[np.float64], *, skip_masked: bool) -> int:
    return max(1, int(np.count_nonzero(trained)) if skip_masked else len(trained))


def _sum_by(bins: NDArray[np.integer], values: NDArray[np.float64], n_bins: int) -> NDArray[np.float64]:
    return np.asarray(np.bincount(bins, weights=values, minlength=n_bins), dtype=np.float64)
