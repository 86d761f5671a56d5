"""The functions of `write-an-algorithm.md`: what they compute, by hand, and what the page says of their options."""

from __future__ import annotations

import pytest
import torch
from slime_algos.testing import check_advantage, check_loss, view_of
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import algorithm

HERE = "docs.examples.own_algorithm"
CHOSEN = (
    f"--custom-advantage-function-path={HERE}:uneven", f"--custom-loss-function-path={HERE}:quadratic",
    f"--custom-tis-function-path={HERE}:near",
)  # fmt: skip


@pytest.fixture
def own(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root))
    from docs.examples import own_algorithm

    return own_algorithm


def test_they_keep_the_promises_of_their_kinds(own):
    check_advantage(own.uneven)
    check_loss(own.quadratic)


def test_they_compute_what_their_docstrings_say(own):
    view = view_of([[1, 1], [1]], rewards=[1.0, -1.0], rollout_log_probs=[[0.0, -1.5], [0.0]])
    advantages, _ = own.uneven(view)
    assert advantages.tolist() == [1.0, 1.0, -0.5]
    correction, metrics = own.near(view)
    assert (correction.kept.tolist(), float(metrics["near_rejected"])) == ([True, False, True], 1 / 3)
    ratios = torch.tensor([1.2, 1.0, 0.9], dtype=torch.float64)
    loss, _ = own.quadratic(view_of([[1, 1], [1]], log_probs=ratios.log()), advantages)
    # 0.04 / 0.4 - 1.2, 0 - 1, 0.5 * 0.01 / 0.4 + 0.45, of which each weighs a third
    assert float(loss) == pytest.approx((-1.1 - 1.0 + 0.4625) / 3)


def test_a_run_is_given_all_three_with_their_options(root, own):
    registry = Registry.from_environment()
    flags = (
        *CHOSEN,
        "--loss-args",
        '{"width": 0.3}',
        "--tis-args",
        '{"most": 2.0}',
        "--entropy-coef",
        "0.01",
    )
    made = algorithm(
        load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry), registry
    )
    assert made.loss.keywords["width"] == 0.3
    assert made.loss.keywords["entropy_coef"] == 0.01
    assert made.reward_transform == "group-norm"
    assert {"entropy", "rollout_log_probs"} <= made.needs
