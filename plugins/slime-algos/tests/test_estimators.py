"""Estimators, beyond PPO: by hand, and the options that all of them take."""

import dataclasses
import inspect
import math

import pytest
import torch
from slime_algos.advantages.cispo import cispo
from slime_algos.advantages.gdpo import gdpo
from slime_algos.advantages.gpg import gpg
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.grpo_passk import grpo_passk
from slime_algos.advantages.gspo import gspo
from slime_algos.advantages.multi_turn import multi_turn
from slime_algos.advantages.opo import opo
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.advantages.ppo import ppo
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from slime_algos.advantages.rloo import rloo
from slime_algos.testing import random_view, view_of
from slime_core.errors import TrainerError
from slime_core.protocols import TokenView, needs_of

OUTCOME = [grpo, gspo, cispo, rloo, gpg, grpo_passk, multi_turn, reinforce_plus_plus_baseline]
ALL = [*OUTCOME, opo, optimal_token_baseline, ppo, reinforce_plus_plus]
BASELINES_OF_PENALTIES = (ppo, optimal_token_baseline)
"""Others' penalties move a sample's own credit."""
EVERY = pytest.mark.parametrize("estimate", ALL, ids=lambda estimate: estimate.__name__)


def grouped(seed: int) -> TokenView:
    view = random_view(seed)
    return TokenView(**(vars(view) | {"group_ids": torch.arange(len(view.rewards)) // 3}))


@pytest.mark.parametrize("estimate", OUTCOME, ids=lambda estimate: estimate.__name__)
def test_each_token_gets_its_samples_reward(estimate):
    advantages, returns = estimate(view_of([[1, 1], [1], [1, 1, 1]], rewards=[0.5, -1.0, 2.0]))
    assert advantages.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]
    assert returns.tolist() == advantages.tolist()


@pytest.mark.parametrize(
    ("estimate", "transform", "loss"),
    [
        (grpo, "group-norm", "policy_loss"),
        (gspo, "group-norm", "gspo_loss"),
        (cispo, "group-norm", "cispo_loss"),
        (multi_turn, "group-norm", "policy_loss"),
        (rloo, "leave-one-out", "policy_loss"),
        (gpg, "gpg", "policy_gradient_loss"),
        (grpo_passk, "pass-at-k", "policy_loss"),
        (opo, "raw", "policy_loss"),
        (optimal_token_baseline, "raw", "policy_loss"),
        (ppo, "raw", "policy_loss"),
        (reinforce_plus_plus, "raw", "policy_loss"),
        (reinforce_plus_plus_baseline, "group-centre", "policy_loss"),
    ],
)
def test_an_estimator_names_its_reward_transform_and_its_loss(estimate, transform, loss):
    assert (estimate.reward_transform, estimate.loss) == (transform, loss)


def test_opo_weighs_the_baseline_by_length():
    # group 0: (1·2 + 4·1)/3 = 2; group 1: alone; the masked token does not count
    view = view_of([[1, 1], [1, 0], [1]], rewards=[1.0, 4.0, 9.0], group_ids=torch.tensor([0, 0, 5]))
    assert opo(view)[0].tolist() == [-1.0, -1.0, 2.0, 2.0, 0.0]


def probable(masks, rewards, groups, likely, squares):
    """A view by the probability of each token, and the sum of its distribution's squared probabilities."""
    return view_of(
        masks,
        rewards=rewards,
        group_ids=torch.tensor(groups),
        old_log_probs=[[math.log(p) for p in row] for row in likely],
        sum_pi_squared=squares,
    )


def test_the_token_baseline_is_weighed_by_the_squared_gradients_so_far():
    # 1 - 2p + s is 1/2, 1/2 and 1/4, 3/4, which add up to 1/2, 1 and 1/4, 1. Baselines of the two places:
    # (1/2 · 6 + 1/4 · 0) / (3/4) = 4, and (1 · 6 + 1 · 0) / 2 = 3
    view = probable(
        [[1, 1], [1, 1]], [6.0, 0.0], [3, 3],
        [[0.5, 0.5], [0.5, 0.25]], [[0.5, 0.5], [0.25, 0.25]],
    )  # fmt: skip
    advantages, returns = optimal_token_baseline(view)
    assert advantages.tolist() == pytest.approx([2.0, 3.0, -4.0, -3.0])
    assert returns.tolist() == [6.0, 6.0, 0.0, 0.0]


def test_the_token_baseline_counts_trained_tokens_and_is_0_where_a_sample_is_alone():
    half = ([[0.5] * 4, [0.5] * 2, [0.5]], [[0.5] * 4, [0.5] * 2, [0.5]])
    view = probable([[1, 0, 1, 1], [1, 1], [1]], [6.0, 0.0, 7.0], [0, 0, 1], *half)
    # first and second trained token of both: mean 3; the third has no peer; the last sample is alone in its group
    assert optimal_token_baseline(view)[0].tolist() == pytest.approx([3.0, 0.0, 3.0, 6.0, -3.0, -3.0, 7.0])


def test_importance_weights_count_twice_in_the_token_baseline():
    # squared gradients 1/2 and 1/4; ratios e and 1, so 1/2 · 4 (clipped at 2) and 1/4: (2 · 6 + 0) / (9/4) = 16/3
    view = probable([[1], [1]], [6.0, 0.0], [3, 3], [[0.5], [0.5]], [[0.5], [0.25]])
    engine = view.old_log_probs - torch.tensor([1.0, 0.0])
    weighed = dataclasses.replace(view, rollout_log_probs=engine)
    advantages, *_ = optimal_token_baseline(weighed, use_tis=True, tis_clip=2.0)
    assert advantages.tolist() == pytest.approx([6 - 16 / 3, -16 / 3])


def test_equal_rewards_have_a_token_baseline_of_exactly_the_reward():
    view = grouped(5)
    equal = dataclasses.replace(
        view, loss_mask=torch.ones_like(view.loss_mask), rewards=torch.full_like(view.rewards, 0.1)
    )
    advantages, _ = optimal_token_baseline(equal)
    assert set(advantages.tolist()) <= {0.0, 0.1}


def test_reinforce_plus_plus_discounts_over_trained_tokens():
    view = view_of([[1, 0, 1, 1], [0, 0]], rewards=[8.0, 5.0])
    advantages, returns = reinforce_plus_plus(view, gamma=0.5)
    assert advantages.tolist() == returns.tolist() == [2.0, 0.0, 4.0, 8.0, 0.0, 0.0]


def test_turns_are_discounted_by_the_turns_that_follow():
    view = view_of([[1, 1, 0, 1, 0, 0, 1], [1]], rewards=[8.0, 1.0])
    advantages, _ = multi_turn(view, turn_discount=0.5)
    assert (advantages * view.loss_mask).tolist() == [2.0, 2.0, 0, 4.0, 0, 0, 8.0, 1.0]


def test_two_samples_next_to_each_other_are_two_turns():
    advantages, _ = multi_turn(view_of([[1, 1], [1, 1]], rewards=[1.0, 1.0]), turn_discount=0.5)
    assert advantages.tolist() == [1.0] * 4


def test_a_token_answers_for_the_penalties_after_it():
    # k1 of each token: 1, 2, 4; the masked token pays nothing
    view = view_of(
        [[1, 1, 0, 1]],
        rewards=[10.0],
        old_log_probs=[[0.0] * 4],
        ref_log_probs=[[-1.0, -2.0, -torch.inf, -4.0]],
    )
    assert grpo(view, kl_coef=0.5)[0].tolist() == [6.5, 7.0, 8.0, 8.0]
    own, *_ = reinforce_plus_plus_baseline(view, kl_coef=0.5)
    assert own.tolist() == [9.5, 9.0, 10.0, 8.0]


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
    distilled, _ = estimate(view, use_opd=True, opd_kl_coef=0.5)
    gap = (view.old_log_probs - view.teacher_log_probs) * view.loss_mask
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


def test_gdpo_adds_up_weighted_parts_and_leaves_the_score_alone():
    parts = {"acc": torch.tensor([1.0, -1.0, 0.0]), "brief": torch.tensor([2.0, 0.0, -2.0])}
    view = view_of([[1, 1], [1], [0, 1]], rewards=[9.0, 9.0, 9.0], reward_parts=parts)
    advantages, returns = gdpo(view, gdpo_weights={"acc": 1.0, "brief": 0.25})
    assert advantages.tolist() == [1.5, 1.5, -1.0, -0.5, -0.5]
    assert returns.tolist() == advantages.tolist()
    assert needs_of(gdpo, {"gdpo_weights": {"acc": 1.0}}) == {"reward_parts"}
    assert list(gdpo.reward_parts({"gdpo_weights": {"acc": 1.0, "brief": 0.25}})) == ["acc", "brief"]


def test_gdpo_without_parts_is_refused():
    with pytest.raises(TrainerError, match="gdpo_weights is empty"):
        gdpo(view_of([[1]], reward_parts={}))
    with pytest.raises(TrainerError, match="gdpo: TokenView has no reward_parts"):
        gdpo(view_of([[1]]), gdpo_weights={"acc": 1.0})
