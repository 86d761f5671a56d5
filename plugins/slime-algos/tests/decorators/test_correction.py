"""Every policy loss under every off-policy correction, against the papers' formulas written out token by token.

A correction weighs or removes what a token's formula gives; advantages, and what is selected by them, never change.
"""

import math
from dataclasses import replace

import pytest
import torch
from slime_algos.advantages.grpo import grpo
from slime_algos.decorators.objective import policy_objective
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.covariance import clip_cov_loss, kl_cov_loss
from slime_algos.losses.dppo import dppo_loss
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.policy_gradient import policy_gradient_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.losses.sft import sft_loss
from slime_algos.testing import corrected, random_view, view_of
from slime_core.errors import PluginError
from slime_core.protocols.correction import Correction, check_importance

CORRECTIONS = {
    "none": {},
    "TIS": {"use_tis": True, "tis_clip": 1.2},
    "sequence TIS": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5},
    "IcePop": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.7, "tis_clip": 1.4},
    "geometric MIS": {"use_tis": True, "tis_mode": "mask", "tis_level": "geometric", "tis_clip_low": 0.9},
    "normalised": {"use_tis": True, "tis_batch_normalize": True},
    "rejected tokens": {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4},
    "rejected samples": {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0},
    "veto": {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": math.inf, "rs_veto_threshold": 0.5},
    "older than a step": {"max_token_staleness": 1},
    "rejected tokens, and old ones": {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4, "max_token_staleness": 0},
    "TIS and rejection": {"use_tis": True, "tis_clip": 1.2, "use_rs": True, "rs_lower_bound": 0.6},
}  # fmt: skip


def plain(ratio, a, log_prob, log_ratio):
    return -ratio * a


def clipped(ratio, a, log_prob, log_ratio):
    return max(-ratio * a, -ratio.clamp(0.8, 1.2) * a)


def dual_clipped(ratio, a, log_prob, log_ratio):
    loss = clipped(ratio, a, log_prob, log_ratio)
    return min(loss, -1.1 * a) if a < 0 else loss


def weighed_log_prob(ratio, a, log_prob, log_ratio):
    return -ratio.detach().clamp(0.8, 1.2) * a * log_prob


def gate(ratio, a, log_prob, log_ratio):
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def trust_region(ratio, a, log_prob, log_ratio):
    new, old = log_prob.detach().exp(), (log_prob - log_ratio).detach().exp()
    away = new > old if a > 0 else new < old
    return 0 * log_prob if away and abs(new - old) > 0.05 else -ratio.detach() * a * log_prob


def squared(ratio, a, log_prob, log_ratio):
    return -a * log_prob + 0.2 * log_ratio**2


#: Loss, its options, and its formula a token: (ρ, A, log π, log ρ) -> loss.
BY_TOKEN = {
    "policy_loss": (policy_loss, {}, clipped),
    "dual clip": (policy_loss, {"eps_clip_c": 1.1}, dual_clipped),
    "cispo_loss": (cispo_loss, {}, weighed_log_prob),
    "sapo_loss": (sapo_loss, {}, gate),
    "policy_gradient_loss": (policy_gradient_loss, {}, lambda ratio, a, log_prob, log_ratio: -a * log_prob),
    "dppo_loss": (dppo_loss, {"eps_clip": 0.05}, trust_region),
    "dro_loss": (dro_loss, {"dro_beta": 0.4}, squared),
}


def engine_ratio(view, t):
    return math.exp(float(view.old_log_probs[t] - view.rollout_log_probs[t]))


def tokens_of(view, sample):
    inside = range(int(view.offsets[sample]), int(view.offsets[sample + 1]))
    return [t for t in inside if view.loss_mask[t] > 0]


def at_level(view, level, sample, t):
    logs = [math.log(engine_ratio(view, k)) for k in tokens_of(view, sample)]
    if level == "token":
        return engine_ratio(view, t)
    return math.exp(sum(logs) if level == "sequence" else sum(logs) / len(logs))


def factors(view, options):
    """Return the importance weight of each trained token, and whether it is kept, one by one."""
    weights, keeps = {}, {}
    low, high = options.get("tis_clip_low", 0.0), options.get("tis_clip", 2.0)
    for sample in range(len(view.rewards)):
        tokens = tokens_of(view, sample)
        for t in tokens:
            ratio = at_level(view, options.get("tis_level", "token"), sample, t)
            if options.get("tis_mode") == "mask":
                weight = ratio if low <= ratio <= high else 0.0
            else:
                weight = min(max(ratio, low), high)
            weights[t] = weight if options.get("use_tis") else 1.0
            ratio = at_level(view, options.get("rs_level", "token"), sample, t)
            keep = options.get("rs_lower_bound", 0.5) <= ratio <= options.get("rs_upper_bound", 2.0)
            vetoed = any(engine_ratio(view, k) < options.get("rs_veto_threshold", 0.0) for k in tokens)
            young = int(view.staleness[t]) <= options.get("max_token_staleness", math.inf)
            keeps[t] = young and ((keep and not vetoed) if options.get("use_rs") else True)
    if options.get("tis_batch_normalize"):
        mean = sum(weights.values()) / len(weights)
        weights = {t: weight / mean for t, weight in weights.items()}
    return weights, keeps


def case(seed):
    view = random_view(seed)
    view = replace(
        view, rollout_log_probs=view.old_log_probs + 0.5 * (view.rollout_log_probs - view.old_log_probs)
    )
    return view, torch.randn(len(view.loss_mask), generator=torch.Generator().manual_seed(seed)).double()


def kept_tokens(view, keeps):
    return [(s, t) for s in range(len(view.rewards)) for t in tokens_of(view, s) if keeps[t]]


def by_formula(formula, view, advantages, weights, keeps):
    total = 0 * view.log_probs[0]
    for _, t in kept_tokens(view, keeps):
        log_ratio = view.log_probs[t] - view.old_log_probs[t]
        loss = formula(log_ratio.exp(), float(advantages[t]), view.log_probs[t], log_ratio)
        total = total + view.weights[t] * weights[t] * loss
    return total


def by_sample(view, advantages, weights, keeps, *, geometric):
    """GSPO (a ratio a sample, weights a token), and GMPO (a product of clipped ratios, and of weights)."""
    total = 0 * view.log_probs[0]
    for sample in range(len(view.rewards)):
        tokens = [t for t in tokens_of(view, sample) if keeps[t]]
        if not tokens:
            continue
        logs = [view.log_probs[t] - view.old_log_probs[t] for t in tokens]
        if geometric:
            held = [
                min(x, x.clamp(-0.2, 0.2)) if advantages[t] > 0 else max(x, x.clamp(-0.2, 0.2))
                for x, t in zip(logs, tokens, strict=True)
            ]
            ratio = (sum(held) / len(held)).exp()
            weight = math.prod((weights[t] + 1e-10) ** (1 / len(tokens)) for t in tokens)
            credit = sum(float(advantages[t]) for t in tokens) / len(tokens)
            total = total + sum(-view.weights[t] * weight * credit * ratio for t in tokens)
        else:
            ratio = (sum(logs) / len(logs)).exp()
            total = total + sum(
                view.weights[t] * weights[t] * clipped(ratio, float(advantages[t]), None, None)
                for t in tokens
            )
    return total


def by_covariance(view, advantages, weights, keeps, *, price):
    """Clip-Cov without a price, KL-Cov with one: the few are told by advantages as the estimator gave them."""
    tokens = [t for _, t in kept_tokens(view, keeps)]
    if not tokens:
        return 0 * view.log_probs[0]
    mean_a = sum(float(advantages[t]) for t in tokens) / len(tokens)
    mean_p = sum(view.log_probs[t].item() for t in tokens) / len(tokens)
    cov = {t: (float(advantages[t]) - mean_a) * (view.log_probs[t].item() - mean_p) for t in tokens}
    few = max(int(0.2 * len(tokens)), 1)
    total = 0 * view.log_probs[0]
    if price:
        held = sorted(tokens, key=lambda t: -cov[t])[:few]
    else:
        free = []
        for t in tokens:
            ratio, a = (view.log_probs[t] - view.old_log_probs[t]).exp(), float(advantages[t])
            if 0.2 < cov[t] < 5.0 and not -ratio.clamp(0.8, 1.2) * a > -ratio * a:
                free.append(t)
        held = free[:: max(1, math.ceil(len(free) / few))]
    for t in tokens:
        log_ratio, a = view.log_probs[t] - view.old_log_probs[t], float(advantages[t])
        if price:
            loss = -log_ratio.exp() * a + (price * abs(log_ratio) if t in held else 0)
        else:
            loss = 0 * log_ratio if t in held else clipped(log_ratio.exp(), a, None, None)
        total = total + view.weights[t] * weights[t] * loss
    return total


BY_SAMPLE = {
    "gspo_loss": (gspo_loss, {}, lambda *given: by_sample(*given, geometric=False)),
    "geo_mean_loss": (geo_mean_loss, {}, lambda *given: by_sample(*given, geometric=True)),
    "clip_cov_loss": (clip_cov_loss, {"clip_cov_ratio": 0.2, "clip_cov_low": 0.2}, lambda *given: by_covariance(*given, price=None)),
    "kl_cov_loss": (kl_cov_loss, {"kl_cov_ratio": 0.2, "kl_cov_coef": 0.7}, lambda *given: by_covariance(*given, price=0.7)),
}  # fmt: skip
SLOW = {name: (loss, options, lambda *given, f=formula: by_formula(f, *given)) for name, (loss, options, formula) in BY_TOKEN.items()} | BY_SAMPLE  # fmt: skip


def correction_of(view, options):
    found = grpo(view, **options)
    return found[4] if len(found) == 5 else Correction()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", SLOW)
def test_value_and_gradient_are_the_formulas(name, correction):
    loss, options, slow = SLOW[name]
    view, advantages = case(3)
    seen = corrected(view, correction_of(view, CORRECTIONS[correction]))
    found, _ = loss(seen, advantages, **options)
    expected = slow(view, advantages, *factors(view, CORRECTIONS[correction]))
    assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    gradients = [torch.autograd.grad(each, view.log_probs)[0].tolist() for each in (found, expected)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_the_cases_are_corrected_at_all(correction):
    view, _ = case(3)
    weights, keeps = factors(view, CORRECTIONS[correction])
    assert any(weight != 1 for weight in weights.values()) or not all(keeps.values())
    assert any(keeps[t] and weights[t] > 0 for t in keeps)


@pytest.mark.parametrize("estimate_options", [{"use_tis": True}, {"use_rs": True}])
def test_advantages_are_those_without_a_correction(estimate_options):
    view, _ = case(5)
    assert torch.equal(grpo(view, **estimate_options)[0], grpo(view)[0])


def test_rejected_tokens_have_no_loss_of_any_kind():
    # Ratios 4 and 1: the first is rejected. DRO alone would give it 0.1/2 · 2² = 0.2, entropy 5, KL 3²/2.
    view = view_of(
        [[1, 1]], log_probs=[[-1.0, -1.0]], old_log_probs=[[-3.0, -1.0]], ref_log_probs=[[-4.0, -1.0]],
        rollout_log_probs=[[-3.0 - math.log(4), -1.0]], entropy=[[5.0, 7.0]],
    )  # fmt: skip
    advantages = torch.tensor([1.0, 2.0], dtype=torch.float64)
    options = {"entropy_coef": 1.0, "use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k2"}
    loss, metrics = dro_loss(corrected(view, correction_of(view, {"use_rs": True})), advantages, **options)
    assert loss.item() == pytest.approx((2.0 - 7.0) / 2)  # of two tokens one is left: −2 · −1, and −7
    assert metrics["entropy_loss"].item() == pytest.approx(3.5)
    assert metrics["kl_loss"].item() == metrics["ppo_kl"].item() == 0.0


def test_importance_weighs_the_policy_loss_and_neither_entropy_nor_kl():
    view = view_of(
        [[1]], log_probs=[[-1.0]], ref_log_probs=[[-3.0]], old_log_probs=[[-1.0]], entropy=[[5.0]], importance=[[0.5]]
    )  # fmt: skip
    options = {"entropy_coef": 1.0, "use_kl_loss": True, "kl_loss_coef": 1.0}
    loss, _ = policy_loss(view, torch.tensor([4.0], dtype=torch.float64), **options)
    assert loss.item() == 0.5 * -4.0 - 5.0 + 2.0


def test_a_strangers_objective_is_weighed_and_cannot_see_the_weights():
    @policy_objective
    def strange(view, log_ratio, advantages):
        assert view.importance is None
        return advantages**2 + 3, {}

    view = view_of([[1, 1]], log_probs=[[0.0, 0.0]], importance=[[0.5, 2.0]])
    loss, _ = strange(view, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert loss.item() == (0.5 * 4 + 2 * 7) / 2


def test_a_loss_that_does_not_weigh_is_refused_beside_importance_weights():
    with pytest.raises(PluginError, match=r"'sft_loss' does not apply.*weighs_importance"):
        Correction(importance=torch.ones(1)).check_loss(sft_loss)
    Correction(kept=torch.ones(1)).check_loss(sft_loss)  # rejection needs nothing of a loss
    for loss, *_ in SLOW.values():
        Correction(importance=torch.ones(1)).check_loss(loss)


def test_a_loss_that_does_not_weigh_is_refused_before_the_run():
    def estimate(view):
        return view.rewards, view.rewards

    check_importance(estimate, sft_loss)
    estimate.gives_importance = lambda options: True
    with pytest.raises(PluginError, match="sft_loss"):
        check_importance(estimate, sft_loss)


def test_a_losss_metrics_tell_the_part_of_stale_tokens():
    # Ratios 2, 2, 1: A = 1 clips the first two; of the three equal weights 2/3 are clipped, 1/3 of it stale.
    view = view_of(
        [[1, 1, 1]], log_probs=[[-1.0, -1.0, -1.0]], staleness=[[1, 0, 2]],
        old_log_probs=[[-1.0 - math.log(2), -1.0 - math.log(2), -1.0]],
    )  # fmt: skip
    _, plain = policy_loss(view, torch.ones(3, dtype=torch.float64))
    _, metrics = policy_loss(view, torch.ones(3, dtype=torch.float64), staleness_metrics=True)
    assert {name: metrics[name] for name in plain} == plain
    assert metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)
    assert metrics["pg_clipfrac_stale"].item() == pytest.approx(1 / 3)
    assert metrics["ppo_kl_stale"].item() == pytest.approx(-math.log(2) / 3)
