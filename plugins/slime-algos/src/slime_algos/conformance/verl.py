"""verl's functions (0.9.1): estimators, losses, KL, reductions, rollout correction."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from slime_core.protocols import AdvantageEstimator, LossFn, Reducer, TokenView
from slime_core.rewards.transforms import group_norm
from torch import Tensor

from slime_algos import reducers
from slime_algos.advantages.gpg import gpg
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.grpo_passk import grpo_passk
from slime_algos.advantages.opo import opo
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.advantages.ppo import ppo
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from slime_algos.advantages.remax import remax
from slime_algos.advantages.rloo import rloo
from slime_algos.conformance.case import Case
from slime_algos.conformance.preset import KL_COEF, grpo_step
from slime_algos.conformance.rows import Row
from slime_algos.correction import importance_weights, kept
from slime_algos.kl import KL_ESTIMATORS, KlType
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.covariance import clip_cov_loss, kl_cov_loss
from slime_algos.losses.dppo import dppo_loss
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.policy_gradient import policy_gradient_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.losses.value import value_loss
from slime_algos.numerics import VERL
from slime_algos.reward_transforms import gpg as gpg_transform
from slime_algos.reward_transforms import group_centre, leave_one_out, pass_at_k

Transform = Callable[..., Any]

REDUCTIONS: dict[str, Reducer] = {
    "token-mean": reducers.token_mean,
    "seq-mean-token-mean": reducers.sample_mean,
    "seq-mean-token-sum": reducers.sequence_sum,
    "seq-mean-token-sum-norm": partial(reducers.constant, loss_scale_factor=20.0),
}

TIS: dict[str, Any] = {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0, "batch_normalize": False}
KL_TARGETS = (0.05, 0.9, 1.05, 5.0)
KL_HORIZON = 100.0


def rows() -> Iterator[Row]:
    """Yield a row for each function that verl exposes and we have."""
    yield from _estimators()
    yield from _losses()
    yield from _kl()
    yield from _correction()
    for mode, reducer in REDUCTIONS.items():
        yield Row(
            "verl", f"reduction {mode}", partial(_our_reduction, reducer), partial(_their_reduction, mode)
        )
    yield Row("verl", "value_loss", _our_value_loss, _their_value_loss)
    yield Row("verl", "numerics verl: rewards to loss", partial(grpo_step, VERL), _their_grpo_step)


def _core(name: str) -> Any:
    return getattr(importlib.import_module("verl.trainer.ppo.core_algos"), name)


# Estimators.


def _estimators() -> Iterator[Row]:
    whitened = {"normalize_advantages": True}

    def row(
        name: str,
        ours: AdvantageEstimator,
        theirs: str,
        transform: Transform | None = None,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Row:
        return Row(
            "verl",
            name,
            partial(_our_advantages, ours, transform, options or {}),
            partial(_their_advantages, theirs, arguments),
        )

    config = SimpleNamespace(gamma=0.9, get=lambda key, default=None: default)
    unscaled = SimpleNamespace(get=lambda key, default=None: False)
    yield row("ppo (GAE)", ppo, "compute_gae_advantage_return", None, {"gamma": 0.99, "lambd": 0.95} | whitened,
              gamma=0.99, lam=0.95)  # fmt: skip
    yield row("grpo", grpo, "compute_grpo_outcome_advantage", group_norm)
    yield row("grpo, without std", grpo, "compute_grpo_outcome_advantage",
              partial(group_norm, disable_grpo_std_normalization=True), norm_adv_by_std_in_grpo=False)  # fmt: skip
    yield row("rloo", rloo, "compute_rloo_outcome_advantage", leave_one_out)
    yield row("opo", opo, "compute_opo_outcome_advantage")
    yield row("gpg", gpg, "compute_gpg_outcome_advantage", gpg_transform)
    yield row("grpo_passk", grpo_passk, "compute_grpo_passk_outcome_advantage", pass_at_k, config=unscaled)
    yield row("grpo_passk, with std", grpo_passk, "compute_grpo_passk_outcome_advantage",
              partial(pass_at_k, passk_std_normalization=True), config=config)  # fmt: skip
    yield row("reinforce_plus_plus", reinforce_plus_plus, "compute_reinforce_plus_plus_outcome_advantage",
              None, {"gamma": 0.9} | whitened, config=config)  # fmt: skip
    yield row("reinforce_plus_plus_baseline", reinforce_plus_plus_baseline,
              "compute_reinforce_plus_plus_baseline_outcome_advantage", group_centre, whitened)  # fmt: skip
    yield Row("verl", "remax", _our_remax, _their_remax)
    one, several = (f"compute_{form}optimal_token_baseline_advantage" for form in ("", "multi_turn_"))
    for name, theirs, whole, weighted in (
        ("one turn", one, True, False),
        ("several turns", several, False, False),
        ("several turns, importance weights", several, False, True),
    ):
        yield Row("verl", f"optimal_token_baseline, {name}", partial(_our_token_baseline, whole, weighted),
                  partial(_their_token_baseline, theirs, whole, weighted))  # fmt: skip
    yield Row("verl", "adaptive KL coefficient, four batches", _our_adaptive_kl, _their_adaptive_kl)


def _our_advantages(
    estimate: AdvantageEstimator, transform: Transform | None, options: dict[str, Any], case: Case
) -> Tensor:
    view = case.view if transform is None else case.rewarded(transform)
    advantages: Tensor = estimate(view, **options)[0]
    return case.trained(advantages)


def _their_advantages(name: str, arguments: dict[str, Any], case: Case) -> Tensor:
    function = _core(name)
    given = {"token_level_rewards": case.token_rewards, "response_mask": case.mask} | arguments
    if name == "compute_gae_advantage_return":
        given["values"] = case.padded(case.view.values)
    elif name != "compute_reinforce_plus_plus_outcome_advantage":
        given["index"] = case.view.group_ids.numpy()
    return case.trained(case.flat(function(**given)[0]))


def _without_the_first(case: Case) -> tuple[Case, Tensor]:
    """Return the case with the first sample of each group untrained, and each sample's baseline: its reward."""
    ids: list[int] = case.view.group_ids.tolist()
    first = torch.tensor([ids.index(group) for group in ids])
    greedy = first == torch.arange(len(ids))
    mask = case.view.loss_mask * ~greedy[case.view.sample_of_token]
    return replace(case, view=TokenView(**(vars(case.view) | {"loss_mask": mask}))), case.view.rewards[first]


def _our_remax(case: Case) -> Tensor:
    masked, _ = _without_the_first(case)
    return masked.trained(remax(masked.view)[0])


def _their_remax(case: Case) -> Tensor:
    masked, baselines = _without_the_first(case)
    advantages, _ = _core("compute_remax_outcome_advantage")(masked.token_rewards, baselines, masked.mask)
    return masked.trained(masked.flat(advantages))


def _as_one_turn(case: Case, whole: bool) -> Case:
    """Return the case; if `whole`, every token is trained on: verl's form for one turn knows no holes."""
    ones = torch.ones_like(case.view.loss_mask)
    return replace(case, view=replace(case.view, loss_mask=ones)) if whole else case


def _our_token_baseline(whole: bool, weighted: bool, case: Case) -> Tensor:
    case = _as_one_turn(case, whole)
    advantages, returns, *_ = optimal_token_baseline(case.view, use_tis=weighted)
    if weighted:  # verl's are not multiplied yet
        advantages = advantages / _our_weights(TIS, case)
    return torch.cat([case.trained(advantages).nan_to_num(), case.trained(returns)])


def _their_token_baseline(name: str, whole: bool, weighted: bool, case: Case) -> Tensor:
    case = _as_one_turn(case, whole)
    found = _core(name)(
        case.token_rewards,
        case.mask,
        case.view.group_ids.numpy(),
        case.padded(case.view.old_log_probs),
        case.padded(case.view.sum_pi_squared),
        rollout_is_weights=case.padded(_our_weights(TIS, case)) if weighted else None,
    )
    return torch.cat([case.trained(case.flat(column)) for column in found])


def _our_adaptive_kl(case: Case) -> Tensor:
    found: list[float] = []
    state: dict[str, float] = {}
    for target in KL_TARGETS:
        options = {"kl_coef": 0.2, "kl_target": target, "kl_horizon": KL_HORIZON, "kl_loss_type": "k2"}
        *_, metrics, state = rloo(case.view, state=state, **options)
        found += [float(metrics["reward_kl"]), metrics["kl_coef"], state["kl_coef"]]
    return torch.tensor(found, dtype=torch.float64)


def _their_adaptive_kl(case: Case) -> Tensor:
    controller = _core("AdaptiveKLController")(0.2, 0.0, KL_HORIZON)
    masked_mean = importlib.import_module("verl.utils.torch_functional").masked_mean
    old, ref = (case.padded(getattr(case.view, name)) for name in ("old_log_probs", "ref_log_probs"))
    found: list[float] = []
    for target in KL_TARGETS:
        controller.target = target
        kl = float(masked_mean(_core("kl_penalty")(old, ref, "mse") * case.mask, case.mask, axis=-1).mean())
        before = controller.value
        controller.update(kl, len(case.view.rewards))
        found += [kl, before, float(controller.value)]
    return torch.tensor(found, dtype=torch.float64)


# Losses.


def _losses() -> Iterator[Row]:
    clip: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}

    def row(
        name: str,
        ours: LossFn,
        theirs: str,
        mode: str = "token-mean",
        differs: str | None = None,
        **options: Any,
    ) -> Row:
        return Row(
            "verl", name, partial(_our_loss, ours, mode, options), partial(_their_loss, theirs, mode), differs
        )

    for mode in REDUCTIONS:
        yield row(f"policy_loss, dual clip, {mode}", policy_loss, "vanilla", mode, eps_clip_c=3.0, **clip)
    yield row("policy_loss, no dual clip", policy_loss, "vanilla", differs="verl always clips twice, at 3; "
              "eps_clip_c is off unless given", **clip)  # fmt: skip
    yield row("gspo_loss", gspo_loss, "gspo", "seq-mean-token-mean", **clip)
    yield row("gspo_loss, token-mean", gspo_loss, "gspo", **clip)
    yield row("cispo_loss", cispo_loss, "cispo", **clip)
    yield row("sapo_loss", sapo_loss, "sapo", "seq-mean-token-mean")
    yield row("geo_mean_loss", geo_mean_loss, "geo_mean", "seq-mean-token-mean", **clip)
    yield row("policy_gradient_loss", policy_gradient_loss, "gpg")
    yield row("dppo_loss, tv", dppo_loss, "dppo_tv", dppo_ratio_limit=3.0, **clip)
    yield row("dppo_loss, kl", dppo_loss, "dppo_kl", dppo_ratio_limit=3.0, dppo_divergence="kl", **clip)
    yield row("dro_loss", dro_loss, "dro", dro_beta=0.3)
    yield row("clip_cov_loss", clip_cov_loss, "clip_cov", clip_cov_ratio=0.5, clip_cov_low=0.3, **clip)
    yield row("kl_cov_loss", kl_cov_loss, "kl_cov", kl_cov_ratio=0.1, kl_cov_coef=0.5)


def _our_loss(loss: LossFn, mode: str, options: dict[str, Any], case: Case) -> Tensor:
    return case.with_gradient(loss(case.weighted(REDUCTIONS[mode]), case.advantages, **options)[0])


def _their_loss(name: str, mode: str, case: Case) -> Tensor:
    loss, _ = _core("get_policy_loss_fn")(name)(
        old_log_prob=case.padded(case.view.old_log_probs),
        log_prob=case.padded(case.view.log_probs),
        advantages=case.padded(case.advantages),
        response_mask=case.mask,
        loss_agg_mode=mode,
        config=_actor_config(),
    )
    return case.with_gradient(loss)


def _actor_config(*, clip_ratio_high: float = 0.28) -> Any:
    configs = importlib.import_module("verl.workers.config")
    config = configs.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=8,
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=clip_ratio_high, clip_ratio_c=3.0,
        policy_loss=configs.PolicyLossConfig(clip_cov_ratio=0.5, clip_cov_lb=0.3, kl_cov_ratio=0.1, ppo_kl_coef=0.5, dro_beta=0.3),
    )  # fmt: skip
    config.global_batch_info["loss_scale_factor"] = 20.0
    return config


# KL, reduction, values.


def _kl() -> Iterator[Row]:
    kinds: list[tuple[KlType, str, str | None]] = [
        ("k1", "kl", None),
        ("k2", "mse", None),
        ("abs", "abs", None),
        ("low_var_kl", "low_var_kl", None),
        ("k3", "k3", "verl's k3 is cut off at 10, as low_var_kl is; ours is the estimator itself"),
    ]
    for kind, theirs, differs in kinds:
        yield Row("verl", f"KL {kind}", partial(_our_kl, kind, False), partial(_their_kl, theirs), differs)
    yield Row("verl", "KL low_var_kl, straight-through", partial(_our_kl, "low_var_kl", True),
              partial(_their_kl, "k3+"))  # fmt: skip


def _our_kl(kind: KlType, straight_through: bool, case: Case) -> Tensor:
    loss, _ = policy_loss(
        case.weighted(reducers.token_mean),
        torch.zeros_like(case.advantages),
        use_kl_loss=True,
        kl_loss_coef=1.0,
        kl_loss_type=kind,
        kl_straight_through=straight_through,
    )
    values = KL_ESTIMATORS[kind](case.view.log_probs - case.view.ref_log_probs) * case.view.loss_mask
    return torch.cat([values.detach(), case.with_gradient(loss)])


def _their_kl(kind: str, case: Case) -> Tensor:
    kl = _core("kl_penalty")(case.padded(case.view.log_probs), case.padded(case.view.ref_log_probs), kind)
    loss = _core("agg_loss")(kl, case.mask, "token-mean")
    return torch.cat([case.trained(case.flat(kl)).detach(), case.with_gradient(loss)])


def _our_reduction(reducer: Reducer, case: Case) -> Tensor:
    loss: Tensor = case.weighted(reducer).reduce(case.view.log_probs)
    return case.with_gradient(loss)


def _their_reduction(mode: str, case: Case) -> Tensor:
    log_probs = case.padded(case.view.log_probs)
    return case.with_gradient(_core("agg_loss")(log_probs, case.mask, mode, loss_scale_factor=20.0))


def _our_value_loss(case: Case) -> Tensor:
    loss, _ = value_loss(case.weighted(reducers.token_mean), case.returns, value_loss_scale=0.5)
    return case.with_gradient(loss, of="new_values")


def _their_value_loss(case: Case) -> Tensor:
    loss, _ = _core("compute_value_loss")(
        case.padded(case.view.new_values),
        case.padded(case.returns),
        case.padded(case.view.values),
        case.mask,
        0.2,
    )
    return case.with_gradient(loss, of="new_values")


def _their_grpo_step(case: Case) -> Tensor:
    advantages, _ = _core("compute_grpo_outcome_advantage")(
        case.token_rewards, case.mask, case.view.group_ids.numpy()
    )
    log_probs = case.padded(case.view.log_probs)
    config = _actor_config(clip_ratio_high=0.2)
    loss, _ = _core("compute_policy_loss_vanilla")(
        case.padded(case.view.old_log_probs), log_probs, advantages, case.mask, "token-mean", config
    )
    kl = _core("kl_penalty")(log_probs, case.padded(case.view.ref_log_probs), "low_var_kl")
    return case.with_gradient(loss + KL_COEF * _core("agg_loss")(kl, case.mask, "token-mean"))


# Rollout correction.


def _correction() -> Iterator[Row]:
    def weights(name: str, threshold: float | str, differs: str | None = None, **ours: Any) -> Row:
        theirs = {"rollout_is": ours["level"], "rollout_is_threshold": threshold}
        theirs["rollout_is_batch_normalize"] = ours["batch_normalize"]
        return Row("verl", name, partial(_our_weights, ours), partial(_their_weights, theirs), differs)

    plain = {name: value for name, value in TIS.items() if name != "level"}
    yield weights("TIS, token", 2.0, level="token", **plain)
    yield weights("TIS, sequence", 2.0, level="sequence", **plain)
    yield weights("TIS, token, batch-normalised", 2.0, level="token", **plain | {"batch_normalize": True})
    yield weights("TIS, sequence, batch-normalised", 2.0, "verl's mean is over samples, ours over tokens",
                  level="sequence", **plain | {"batch_normalize": True})  # fmt: skip
    masked = plain | {"low": 0.5, "mode": "mask"}
    yield weights("IcePop", "0.5_2.0", level="token", **masked)
    yield weights("MIS, sequence", "0.5_2.0", level="sequence", **masked)
    for level, option in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        yield Row("verl", f"rejection, {level}", partial(_our_kept, level), partial(_their_kept, option))


def _our_weights(options: dict[str, Any], case: Case) -> Tensor:
    return case.trained(importance_weights(case.view, **options)[0])


def _their_weights(options: dict[str, Any], case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    weights, _ = helper.compute_rollout_correction_weights(log_ratio, case.mask, **options)
    return case.trained(case.flat(weights))


def _our_kept(level: Any, case: Case) -> Tensor:
    return case.trained(kept(case.view, level=level, low=0.8, high=1.25, veto=0.0)[0])


def _their_kept(option: str, case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    keep, _ = helper.compute_rollout_rejection_mask(log_ratio, case.mask, option, 1.25)
    return case.flat(keep)
