"""Off-policy correction: weights and rejection, on two samples by hand."""

import math

import pytest
import torch
from slime_algos.correction import importance_weights, kept
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
