"""The options that all estimators take."""

import inspect
import math

import pytest
import torch
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.multi_turn import multi_turn
from slime_algos.advantages.opo import opo
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.advantages.ppo import ppo
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus
from slime_algos.testing import view_of
from slime_core.errors import TrainerError
from slime_core.protocols import needs_of

from ..estimators import OUTCOME, grouped

ALL = [*OUTCOME, opo, optimal_token_baseline, ppo, reinforce_plus_plus]


#: Others' penalties move a sample's own credit.
BASELINES_OF_PENALTIES = (ppo, optimal_token_baseline)


EVERY = pytest.mark.parametrize("estimate", ALL, ids=lambda estimate: estimate.__name__)


@EVERY
def test_kl_in_the_reward_changes_every_estimator(estimate):
    view = grouped(1)
    plain, penalised = estimate(view)[0], estimate(view, kl_coef=0.1, kl_loss_type="k2")[0]
    trained = view.loss_mask > 0
    assert not torch.equal(plain[trained], penalised[trained])
    assert (penalised[trained] <= plain[trained] + 1e-12).all() or estimate in BASELINES_OF_PENALTIES


@EVERY
def test_distillation_is_added_to_every_estimator(estimate):
    view = grouped(2)
    distilled, _, metrics, *_ = estimate(view, use_opd=True, opd_kl_coef=0.5)
    gap = (view.old_log_probs - view.teacher_log_probs) * view.loss_mask
    trained = [(view.sample_of_token == i) & (view.loss_mask > 0) for i in range(len(view.rewards))]
    means = [float(gap[one].mean()) for one in trained if one.any()]
    assert float(metrics["opd_reverse_kl"]) == pytest.approx(sum(means) / len(means), abs=1e-9)
    assert distilled.tolist() == pytest.approx((estimate(view)[0] - 0.5 * gap).tolist(), abs=1e-12)


@EVERY
def test_whitening_leaves_mean_zero_and_variance_one(estimate):
    view = grouped(3)
    white = estimate(view, normalize_advantages=True)[0][view.loss_mask > 0]
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    "estimate",
    [each for each in ALL if each is not optimal_token_baseline],  # its baseline reads them too
    ids=lambda estimate: estimate.__name__,
)
def test_corrections_change_no_estimators_advantages(estimate):
    view = grouped(4)
    advantages, _, metrics, state, correction = estimate(view, use_tis=True, tis_clip=1.1, use_rs=True)
    assert torch.equal(advantages, estimate(view)[0])
    assert state == {}
    ratio = ((view.old_log_probs - view.rollout_log_probs) * view.loss_mask).exp()
    trained = view.loss_mask > 0
    assert correction.importance.tolist() == pytest.approx(ratio.clamp(max=1.1).tolist())
    assert correction.kept.tolist() == ((ratio >= 0.5) & (ratio <= 2.0)).tolist()
    assert metrics["tis"].item() == pytest.approx(ratio[trained].mean().item())


@EVERY
def test_rejected_tokens_that_do_not_count_are_not_whitened(estimate):
    view = grouped(4)
    options = {"normalize_advantages": True, "use_rs": True, "rs_lower_bound": 0.9}
    white, _, _, _, correction = estimate(view, **options, rs_count_rejected=False)
    left = (view.loss_mask > 0) & correction.kept
    assert 1 < left.sum() < view.loss_mask.sum()
    assert white[left].mean().item() == pytest.approx(0, abs=1e-12)
    assert torch.equal(estimate(view, **options)[0], estimate(view, normalize_advantages=True)[0])


@pytest.mark.parametrize("use", ["use_tis", "use_rs"])
def test_an_estimator_says_whether_it_gives_importance(use):
    assert ppo.gives_importance({use: True}) is (use == "use_tis")
    assert not ppo.gives_importance({})


@EVERY
def test_a_fully_masked_batch_gives_finite_advantages(estimate):
    filled = {"values": [[1.0, 1.0], [1.0]], "sum_pi_squared": [[1.0, 1.0], [1.0]]}
    view = view_of([[0, 0], [0]], rewards=[1.0, 2.0], group_ids=torch.tensor([0, 0]), **filled)
    for column in estimate(view, normalize_advantages=True):
        assert torch.isfinite(column).all()


@pytest.mark.parametrize(
    ("option", "field"),
    [("kl_coef", "ref_log_probs"), ("use_opd", "teacher_log_probs"), ("use_tis", "rollout_log_probs"),
     ("use_rs", "rollout_log_probs")],
)  # fmt: skip
def test_an_option_names_the_field_that_it_reads(option, field):
    assert needs_of(grpo, {option: True}) == {"old_log_probs", field}
    with pytest.raises(TrainerError, match=f"grpo: TokenView has no {field}"):
        grpo(view_of([[1.0]]), **{option: True})


def test_common_options_are_in_the_signature_beside_the_estimators_own():
    parameters = inspect.signature(multi_turn).parameters
    assert next(iter(parameters)) == "view"
    assert parameters["turn_discount"].default == 1.0
    assert parameters["kl_coef"].default == 0.0
    assert "options" not in parameters


def test_one_trained_token_whitens_to_zero():
    assert grpo(view_of([[1, 0]], rewards=[3.0]), normalize_advantages=True)[0].tolist() == [0.0, 0.0]


def test_without_options_there_are_no_metrics():
    assert len(grpo(view_of([[1.0]], rewards=[1.0]))) == 2
    assert math.isfinite(grpo(view_of([[1.0]], rewards=[1.0]))[0].item())
