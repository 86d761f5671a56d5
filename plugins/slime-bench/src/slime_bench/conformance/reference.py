"""The reference system's conventions where ours could differ, written out token by token: its package is not on an index.

Each function here is slow on purpose: plain loops over samples and tokens, from slime/backends/megatron_utils/loss.py,
slime/utils/ppo_utils.py and slime/utils/dp_schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from slime_algos import reducers
from slime_algos.advantages.grpo import grpo
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.value import value_loss
from slime_algos.testing import corrected
from slime_core.data.make_batch import optimizer_steps
from slime_core.errors import SampleError
from torch import Tensor

from slime_bench.conformance.case import Case
from slime_bench.conformance.rows import Row

STEP = 4
"""Executions of an optimizer step, which do not divide those of a case."""
LOW, HIGH = 0.8, 1.25
ENTROPY_COEF, KL_COEF = 0.3, 0.1


def rows() -> Iterator[Row]:
    """Yield a row for each convention."""

    yield Row("slime", "rejected tokens: loss, entropy, KL, sample-mean", _our_rejected, _their_rejected)
    yield Row("slime", "unbiased KL, low_var_kl", _our_unbiased_kl, _their_unbiased_kl)
    yield Row("slime", "value_clipfrac", _our_value_clipfrac, _their_value_clipfrac)
    yield Row("slime", "metric tis, over tokens", _our_mean_ratio, _their_mean_ratio)
    dropped = "slime drops the last executions; ours, as verl's, are refused"
    yield Row("slime", "samples of an unfilled last step", _our_filled, _their_filled, dropped)


def _tokens(case: Case) -> Iterator[tuple[int, int]]:
    """Yield (sample, token) of each trained token."""
    for token in range(len(case.advantages)):
        if case.view.loss_mask[token] > 0:
            yield int(case.view.sample_of_token[token]), token


def _lengths(case: Case) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for sample, _ in _tokens(case):
        lengths[sample] = lengths.get(sample, 0) + 1
    return lengths


def _our_rejected(case: Case) -> Tensor:
    *_, correction = grpo(case.view, use_tis=True, use_rs=True, rs_lower_bound=LOW, rs_upper_bound=HIGH)
    loss, _ = policy_loss(
        corrected(case.weighted(reducers.sample_mean), correction), case.advantages,
        entropy_coef=ENTROPY_COEF, use_kl_loss=True, kl_loss_coef=KL_COEF, kl_loss_type="k2",
    )  # fmt: skip
    return case.with_gradient(loss)


def _their_rejected(case: Case) -> Tensor:
    """Leave rejected tokens out of every sum, and in the number that the sum is divided by."""
    view, lengths = case.view, _lengths(case)
    total = torch.zeros((), dtype=case.advantages.dtype)
    for sample, t in _tokens(case):
        mismatch = (view.old_log_probs[t] - view.rollout_log_probs[t]).exp()
        if not LOW <= float(mismatch) <= HIGH:
            continue
        ratio = (view.log_probs[t] - view.old_log_probs[t]).exp()
        policy = torch.maximum(-ratio * case.advantages[t], -ratio.clamp(0.8, 1.2) * case.advantages[t])
        kl = (view.log_probs[t] - view.ref_log_probs[t]) ** 2 / 2
        token = policy * min(float(mismatch), 2.0) - ENTROPY_COEF * view.entropy[t] + KL_COEF * kl
        total = total + token / lengths[sample] / len(view.rewards)
    return case.with_gradient(total)


def _our_unbiased_kl(case: Case) -> Tensor:
    loss, _ = policy_loss(
        case.weighted(reducers.token_mean), torch.zeros_like(case.advantages),
        use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="low_var_kl", use_unbiased_kl=True,
    )  # fmt: skip
    return case.with_gradient(loss)


def _their_unbiased_kl(case: Case) -> Tensor:
    """Cut the estimate off at 10 after it was weighed by the ratio."""
    view = case.view
    n = sum(_lengths(case).values())
    total = torch.zeros((), dtype=case.advantages.dtype)
    for _, t in _tokens(case):
        x = view.log_probs[t] - view.ref_log_probs[t]
        ratio = (view.log_probs[t] - view.old_log_probs[t]).exp()
        total = total + (ratio * (torch.expm1(-x) + x)).clamp(-10, 10) / n
    return case.with_gradient(total)


def _our_value_clipfrac(case: Case) -> Tensor:
    _, metrics = value_loss(case.weighted(reducers.token_mean), case.returns, value_clip=0.2)
    return metrics["value_clipfrac"].reshape(1)


def _their_value_clipfrac(case: Case) -> Tensor:
    moved = [float((case.view.new_values[t] - case.view.values[t]).abs()) > 0.2 for _, t in _tokens(case)]
    return torch.tensor([sum(moved) / len(moved)], dtype=case.advantages.dtype)


def _our_mean_ratio(case: Case) -> Tensor:
    _, _, metrics, *_ = grpo(case.view, use_tis=True)
    return torch.stack([metrics["tis"], metrics["tis_clipfrac"]])


def _their_mean_ratio(case: Case) -> Tensor:
    ratios = [
        float((case.view.old_log_probs[t] - case.view.rollout_log_probs[t]).exp()) for _, t in _tokens(case)
    ]
    clipped = sum(ratio > 2.0 for ratio in ratios)
    return torch.tensor([sum(ratios) / len(ratios), clipped / len(ratios)], dtype=case.advantages.dtype)


def _our_filled(case: Case) -> Tensor:
    """Return how many samples are trained on: none, where the step is refused."""
    try:
        steps = optimizer_steps(np.arange(len(case.view.rewards)), global_batch_size=STEP)
    except SampleError:
        steps = ()
    return torch.tensor([float(sum(len(step) for step in steps))])


def _their_filled(case: Case) -> Tensor:
    return torch.tensor([float(len(case.view.rewards) // STEP * STEP)])
