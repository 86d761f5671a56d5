"""Off-policy correction: weights and rejection, on two samples by hand."""

import math
from dataclasses import replace

import pytest
import torch
from slime_algos.terms.correction import importance_weights, kept, kept_fresh
from slime_algos.testing import view_of

LN2 = math.log(2)


def two_samples():
    """Ratios π_old/μ: 4 and 1/2 (an environment's token between them), and 1/8; products 2 and 1/8."""
    return view_of(
        [[1, 0, 1], [1]],
        old_log_probs=[[2 * LN2, 99.0, -LN2], [-3 * LN2]],
        rollout_log_probs=[[0.0, -torch.inf, 0.0], [0.0]],
    )


def weights(**options):
    defaults = {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0, "batch_normalize": False}
    found, metrics = importance_weights(two_samples(), **defaults | options)
    trained = two_samples().loss_mask > 0
    return found[trained].tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 0.5, 0.125]),
        ({"low": 0.25}, [2, 0.5, 0.25]),
        ({"high": torch.inf}, [4, 0.5, 0.125]),
        ({"low": 0.25, "mode": "mask"}, [0, 0.5, 0]),
        ({"level": "sequence"}, [2, 2, 0.125]),
        ({"level": "sequence", "high": 1.5}, [1.5, 1.5, 0.125]),
        ({"level": "geometric"}, [2**0.5, 2**0.5, 0.125]),
        ({"level": "geometric", "mode": "mask", "low": 0.5}, [2**0.5, 2**0.5, 0]),
        ({"batch_normalize": True}, [16 / 7, 4 / 7, 1 / 7]),
    ],
)
def test_weights_by_hand(options, expected):
    assert weights(**options)[0] == pytest.approx(expected)


def test_metrics_are_over_trained_tokens():
    _, metrics = weights()
    assert metrics["tis"] == pytest.approx((4 + 0.5 + 0.125) / 3)  # ratios as they were
    assert weights(reported="weight")[1]["tis"] == pytest.approx(2.625 / 3)  # 4 is held at 2
    assert metrics["tis_abs"] == pytest.approx((3 + 0.5 + 0.875) / 3)
    assert metrics["tis_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["tis_ess"] == pytest.approx(2.625**2 / (3 * (4 + 0.25 + 1 / 64)))


def test_equal_policies_weigh_one_and_have_the_whole_sample_size():
    view = view_of([[1, 1]], old_log_probs=[[-1.0, -2.0]], rollout_log_probs=[[-1.0, -2.0]])
    found, metrics = importance_weights(view, level="token", mode="clip", low=0, high=2, batch_normalize=True)
    assert found.tolist() == [1.0, 1.0]
    assert metrics["tis_ess"].item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("level", "low", "high", "veto", "expected"),
    [
        ("token", 0.25, 5.0, 0.0, [1, 1, 0]),
        ("token", 0.1, 2.0, 0.0, [0, 1, 1]),
        ("sequence", 1.0, 3.0, 0.0, [1, 1, 0]),
        ("geometric", 0.1, 1.0, 0.0, [0, 0, 1]),
        ("token", 0.0, 10.0, 0.6, [0, 0, 0]),  # one token below the threshold rejects its sample whole
        ("token", 0.0, 10.0, 0.2, [1, 1, 0]),
    ],
)
def test_rejection_by_hand(level, low, high, veto, expected):
    view = two_samples()
    keep, metrics = kept(view, level=level, low=low, high=high, veto=veto)
    trained = view.loss_mask > 0
    assert keep[trained].tolist() == expected
    assert metrics["rs_rejected"].item() == pytest.approx(1 - sum(expected) / 3)


@pytest.mark.parametrize(("veto", "expected"), [(1e-12, [1, 0]), (1e-14, [1, 1])])
def test_a_veto_sees_ratios_below_the_least_importance_weight(veto, expected):
    """The second sample's ratio is exp(-30), 9.4e-14; importance weights end at exp(-20)."""
    view = view_of([[1], [1]], old_log_probs=[[-1.0], [-31.0]], rollout_log_probs=[[-1.0], [-1.0]])
    keep, _ = kept(view, level="token", low=0.0, high=10.0, veto=veto)
    assert keep.tolist() == expected


def test_stale_tokens_are_reported_apart_by_hand():
    """Ratios 4 and 1/8 are of stale tokens, 1/2 is of one that is not; the environment's token counts for neither."""
    view = replace(two_samples(), staleness=torch.tensor([1, 9, 0, 3]))
    options = {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0, "batch_normalize": False}
    _, plain = importance_weights(view, **options)
    _, found = importance_weights(view, **options, by_staleness=True)
    assert {name: found[name] for name in plain} == plain
    apart = {name: found[name].item() for name in found.keys() - plain.keys()}
    assert apart == pytest.approx(
        {
            "tis_stale": (4 + 0.125) / 2, "tis_abs_stale": (3 + 0.875) / 2, "tis_clipfrac_stale": 0.5,
            "tis_on_policy": 0.5, "tis_abs_on_policy": 0.5, "tis_clipfrac_on_policy": 0.0,
        }
    )  # fmt: skip
    _, found = kept(view, level="token", low=0.25, high=5.0, veto=0.0, by_staleness=True)
    assert found["rs_rejected_stale"].item() == 0.5
    assert found["rs_rejected_on_policy"].item() == 0.0


def test_without_stale_tokens_nothing_is_said_of_them():
    view = replace(two_samples(), staleness=torch.zeros(4, dtype=torch.int64))
    _, found = kept(view, level="token", low=0.25, high=5.0, veto=0.0, by_staleness=True)
    assert set(found) == {"rs_rejected", "rs_rejected_on_policy"}


@pytest.mark.parametrize(
    ("most", "expected"), [(0, [0, 1, 0]), (1, [1, 1, 0]), (2, [1, 1, 0]), (3, [1, 1, 1])]
)
def test_tokens_beyond_the_bound_on_staleness_are_rejected(most, expected):
    view = replace(two_samples(), staleness=torch.tensor([1, 9, 0, 3]))
    keep, metrics = kept_fresh(view, most=most)
    assert keep[view.loss_mask > 0].tolist() == expected
    assert metrics["stale_rejected"].item() == pytest.approx(1 - sum(expected) / 3)
