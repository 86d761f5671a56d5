"""Where frameworks differ: each convention on numbers worked out by hand, and what the presets make of it.

`slime bench conformance` has a row for each; the README's table says whose is which.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_algos import reducers
from slime_algos.advantages.grpo import grpo
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.value import value_loss
from slime_algos.numerics import OPENRLHF, SLIME, TRL, VERL
from slime_algos.testing import view_of
from slime_bench.conformance import reference
from slime_bench.conformance.case import Case
from slime_core.data.make_batch import optimizer_steps
from slime_core.errors import SampleError
from slime_core.protocols import ReductionView

ONE = torch.ones(1, dtype=torch.float64)


def algos(conventions, *names):
    return {name: conventions["algos"][name] for name in names}


@pytest.mark.parametrize(("conventions", "counted"), [(SLIME, True), (VERL, False)])
def test_rejected_tokens_count_in_denominators_with_slime_and_do_not_with_verl(conventions, counted):
    # Ratios 4 and 1, within [1/2, 2] the second. −A·log π is 2 there, entropy 7: (2 − 7)/2, or over one token −5.
    view = view_of(
        [[1, 1]], log_probs=[[-1.0, -1.0]], old_log_probs=[[-3.0, -1.0]], entropy=[[5.0, 7.0]],
        rollout_log_probs=[[-3.0 - math.log(4), -1.0]],
    )  # fmt: skip
    _, _, metrics, _, correction = grpo(view, use_rs=True, **algos(conventions, "rs_count_rejected"))
    assert correction.count_rejected is counted
    assert metrics["rs_rejected"].item() == 0.5
    mask = view.loss_mask * correction.kept
    given = ReductionView(
        loss_mask=(view.loss_mask if counted else mask).numpy(), response_lengths=np.full(1, 2), rollout_ids=np.zeros(1, int)
    )  # fmt: skip
    weights = torch.as_tensor(reducers.token_mean(given)) * mask
    seen = replace(view, loss_mask=mask, weights=weights)
    loss, _ = dro_loss(seen, 2 * torch.ones(2, dtype=torch.float64), entropy_coef=1.0)
    assert loss.item() == pytest.approx(-2.5 if counted else -5)


@pytest.mark.parametrize(
    ("ratio", "kl"),
    [
        (0.05, 0.05 * (math.exp(5) - 6)),  # 7.12, and not 0.05 · 10, as if cut off before
        (0.5, 10.0),  # 71.2, cut off; and not 5
        (0.001, 0.001 * (math.exp(5) - 6)),
    ],
)
def test_unbiased_low_variance_kl_is_cut_off_after_it_was_weighed(ratio, kl):
    # x = log π − log π_ref = −5, so that k3 is e⁵ − 1 − 5 = 142.4
    view = view_of(
        [[1]], log_probs=[[-6.0]], ref_log_probs=[[-1.0]], old_log_probs=[[-6.0 - math.log(ratio)]]
    )
    _, metrics = policy_loss(view, ONE, use_kl_loss=True, kl_loss_type="low_var_kl", use_unbiased_kl=True)
    assert metrics["kl_loss"].item() == pytest.approx(kl)
    _, metrics = policy_loss(view, ONE, use_kl_loss=True, kl_loss_type="low_var_kl")
    assert metrics["kl_loss"].item() == 10.0


@pytest.mark.parametrize(("conventions", "share"), [(SLIME, 1.0), (VERL, 0.0)])
def test_value_clipfrac_counts_values_that_moved_or_losses_that_are_larger(conventions, share):
    # From 1.0 to 0.5 with a return of 2: moved by more than 0.2, but (0.8 − 2)² = 1.44 is less than (0.5 − 2)² = 2.25.
    view = view_of([[1]], values=[[1.0]], new_values=[[0.5]])
    _, metrics = value_loss(view, 2 * ONE, value_clip=0.2, **algos(conventions, "value_clipfrac"))
    assert metrics["value_clipfrac"].item() == share


@pytest.mark.parametrize(
    ("conventions", "mean"), [(SLIME, 2.25), (VERL, 1.25), (TRL, 1.25), (OPENRLHF, 2.25)]
)
def test_the_metric_tis_is_of_ratios_or_of_weights(conventions, mean):
    # Ratios 4 and 1/2; held at 2, the weights are 2 and 1/2.
    view = view_of([[1, 1]], old_log_probs=[[0.0, 0.0]], rollout_log_probs=[[-math.log(4), math.log(2)]])
    _, _, metrics, *_ = grpo(view, use_tis=True, tis_clip=2.0, **algos(conventions, "tis_metric"))
    assert metrics["tis"].item() == pytest.approx(mean)


def test_a_step_that_the_last_executions_do_not_fill_is_refused():
    # 15 executions in steps of 4: slime trains on 12 of them
    with pytest.raises(SampleError, match=r"15 executions cannot be cut.*divisor of 15"):
        optimizer_steps(np.arange(15), global_batch_size=4)
    (row,) = [row for row in reference.rows() if "unfilled" in row.name]
    case = Case.random(0)
    assert (row.ours(case).item(), row.theirs(case).item()) == (0.0, 12.0)


def test_every_convention_has_a_row():
    names = " ".join(row.name for row in reference.rows())
    for convention in (
        "rejected tokens",
        "unbiased KL, low_var_kl",
        "value_clipfrac",
        "metric tis",
        "unfilled",
    ):
        assert convention in names
