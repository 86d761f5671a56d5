"""Generalised advantage estimation: by hand, against recursion over each sample, and with the common options."""

import pytest
import torch
from slime_algos.advantages.ppo import ppo
from slime_algos.testing import random_view, view_of
from slime_core.errors import TrainerError
from slime_core.protocols import needs_of


def rows(view, column):
    return [column[a:b].tolist() for a, b in zip(view.offsets, view.offsets[1:], strict=False)]


def slow_gae(view, gamma, lambd):
    """Return (advantages, returns), flat, by recursion from the end of each sample over its trained tokens."""
    advantages, returns = [], []
    for mask, values, reward in zip(
        rows(view, view.loss_mask), rows(view, view.values), view.rewards.tolist(), strict=True
    ):
        a, g = [0.0] * len(mask), [0.0] * len(mask)
        next_value = running = 0.0
        first = True
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            running = (reward if first else 0.0) + gamma * next_value - values[t] + gamma * lambd * running
            a[t], g[t], next_value, first = running, running + values[t], values[t], False
        advantages += a
        returns += g
    return advantages, returns


def test_advantages_of_three_tokens_by_hand():
    # δ = [0.5·2 − 1, 0.5·4 − 2, 8 − 4] = [0, 0, 4]; each is worth half of half of the one after it
    view = view_of([[1, 1, 1]], rewards=[8.0], values=[[1.0, 2.0, 4.0]])
    advantages, returns = ppo(view, gamma=0.5, lambd=0.5)
    assert advantages.tolist() == [0.25, 1.0, 4.0]
    assert returns.tolist() == [1.25, 3.0, 8.0]


def test_an_environments_tokens_are_no_steps_of_the_policy():
    # the same three tokens, with two that an environment wrote between them and one after them
    view = view_of([[1, 0, 0, 1, 1, 0]], rewards=[8.0], values=[[1.0, 7.0, -7.0, 2.0, 4.0, 7.0]])
    advantages, returns = ppo(view, gamma=0.5, lambd=0.5)
    assert advantages.tolist() == [0.25, 0.0, 0.0, 1.0, 4.0, 0.0]
    assert returns.tolist() == [1.25, 0.0, 0.0, 3.0, 8.0, 0.0]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.5, 0.9)])
@pytest.mark.parametrize("longest", [1, 2, 3, 9, 70])
def test_random_ragged_samples_equal_recursion(gamma, lambd, longest):
    view = random_view(longest, longest=longest)
    advantages, returns = ppo(view, gamma=gamma, lambd=lambd)
    slow_advantages, slow_returns = slow_gae(view, gamma, lambd)
    assert advantages.tolist() == pytest.approx(slow_advantages, rel=1e-12, abs=1e-12)
    assert returns.tolist() == pytest.approx(slow_returns, rel=1e-12, abs=1e-12)


def test_lambda_one_gives_the_return_less_the_value():
    view = random_view(3)
    advantages, returns = ppo(view)
    mask = view.loss_mask
    assert returns.tolist() == pytest.approx((view.rewards[view.sample_of_token] * mask).tolist(), abs=1e-12)
    assert advantages.tolist() == pytest.approx(((returns - view.values) * mask).tolist(), abs=1e-12)


def test_twenty_thousand_tokens_keep_five_digits_in_float32():
    view = random_view(1, n_samples=3, longest=20_000, masked=0.0)
    advantages, _ = ppo(view, gamma=0.9999, lambd=0.999)
    single = {k: v.float() if v.is_floating_point() else v for k, v in vars(view).items() if v is not None}
    rounded, _ = ppo(type(view)(**single), gamma=0.9999, lambd=0.999)
    assert rounded.dtype == torch.float32
    assert (rounded - advantages).abs().max() < 5e-6 * advantages.abs().max()


def test_a_batch_without_trained_tokens_gets_zeros():
    advantages, returns = ppo(view_of([[0, 0], [0]], rewards=[1.0, 2.0], values=[[1.0, 1.0], [1.0]]))
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0, 0.0]


def test_advantages_carry_no_gradient():
    view = view_of([[1, 1]], values=torch.ones(2, dtype=torch.float64, requires_grad=True))
    assert not any(result.requires_grad for result in ppo(view))


def test_kl_in_the_reward_is_a_cost_of_each_token():
    # ρ = [−0.5·1, −0.5·3 + 4] with x = [1, 3]; without a critic's help, λ = γ = 1
    view = view_of(
        [[1, 1]],
        rewards=[4.0],
        values=[[0.0, 0.0]],
        old_log_probs=[[0.0, 0.0]],
        ref_log_probs=[[-1.0, -3.0]],
    )
    advantages, *_ = ppo(view, kl_coef=0.5)
    assert advantages.tolist() == [2.0, 2.5]


def test_whitened_advantages_have_mean_zero_and_variance_one_over_trained_tokens():
    view = random_view(5)
    advantages, returns = ppo(view, normalize_advantages=True)
    trained = advantages[view.loss_mask > 0]
    assert trained.mean().item() == pytest.approx(0, abs=1e-12)
    assert trained.var().item() == pytest.approx(1, rel=1e-6)
    assert advantages[view.loss_mask == 0].tolist() == [0.0] * int((view.loss_mask == 0).sum())
    assert returns.tolist() == ppo(view)[1].tolist()


def test_needs_the_critics_values_and_what_its_options_ask_for():
    assert ppo.reward_transform == "raw"
    assert needs_of(ppo, {}) == {"values"}
    assert needs_of(ppo, {"kl_coef": 0.1}) == {"old_log_probs", "values", "ref_log_probs"}
    assert needs_of(ppo, {"use_opd": True}) == {"old_log_probs", "values", "teacher_log_probs"}


def test_a_view_without_values_is_refused():
    with pytest.raises(TrainerError, match="ppo: TokenView has no values"):
        ppo(view_of([[1.0]]))
