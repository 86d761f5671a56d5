"""verl's functions (0.9.1): losses, KL, reductions, rollout correction; its estimators are in `verl_estimators`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from slime_algos import reducers
from slime_algos.advantages.grpo import grpo
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
from slime_algos.terms.correction import importance_weights, kept
from slime_algos.terms.kl import KL_ESTIMATORS, KlType
from slime_core.protocols import LossFn, Reducer
from torch import Tensor

from slime_bench.conformance import verl_estimators
from slime_bench.conformance.case import Case
from slime_bench.conformance.preset import KL_COEF, grpo_step
from slime_bench.conformance.rows import Row
from slime_bench.conformance.verl_estimators import TIS, core, our_weights

REDUCTIONS: dict[str, Reducer] = {
    "token-mean": reducers.token_mean,
    "seq-mean-token-mean": reducers.sample_mean,
    "seq-mean-token-sum": reducers.sequence_sum,
    "seq-mean-token-sum-norm": partial(reducers.constant, loss_scale_factor=20.0),
}


def rows() -> Iterator[Row]:
    """Yield a row for each function that verl exposes and we have."""
    yield from verl_estimators.rows()
    yield from _losses()
    yield from _kl()
    yield from _correction()
    for mode, reducer in REDUCTIONS.items():
        yield Row(
            "verl", f"reduction {mode}", partial(_our_reduction, reducer), partial(_their_reduction, mode)
        )
    yield Row("verl", "value_loss", _our_value_loss, _their_value_loss)
    yield Row("verl", "value_clipfrac", _our_value_clipfrac, _their_value_clipfrac)
    for mode in ("token-mean", "seq-mean-token-mean"):
        yield Row("verl", f"rejected tokens: loss, entropy, KL, {mode}", partial(_our_rejected, mode),
                  partial(_their_rejected, mode))  # fmt: skip
    yield Row("verl", "numerics verl: rewards to loss", partial(grpo_step, VERL), _their_grpo_step)


# Losses.


def _losses() -> Iterator[Row]:
    clip: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}

    def row(
        name: str,
        ours: LossFn,
        theirs: str,
        mode: str = "token-mean",
        differs: str | None = None,
        tis: bool = False,
        **options: Any,
    ) -> Row:
        name = f"{name}, TIS" if tis else name
        our, their = (
            partial(_our_loss, ours, mode, options, tis=tis),
            partial(_their_loss, theirs, mode, tis=tis),
        )
        return Row("verl", name, our, their, differs)

    for mode in REDUCTIONS:
        yield row(f"policy_loss, dual clip, {mode}", policy_loss, "vanilla", mode, eps_clip_c=3.0, **clip)
    yield row("policy_loss, no dual clip", policy_loss, "vanilla", differs="verl always clips twice, at 3; "
              "eps_clip_c is off unless given", **clip)  # fmt: skip
    yield row("policy_loss, dual clip", policy_loss, "vanilla", tis=True, eps_clip_c=3.0, **clip)
    yield row("gspo_loss, token-mean", gspo_loss, "gspo", **clip)
    yield row("gspo_loss", gspo_loss, "gspo", "seq-mean-token-mean", **clip)
    yield row("gspo_loss", gspo_loss, "gspo", "seq-mean-token-mean", tis=True, differs="verl's gradient is token by "
              "token (GSPO, eq. 13), ours, as TRL's, that of the loss", **clip)  # fmt: skip
    for tis in (False, True):
        yield row("cispo_loss", cispo_loss, "cispo", tis=tis, **clip)
        yield row("sapo_loss", sapo_loss, "sapo", "seq-mean-token-mean", tis=tis)
        yield row("geo_mean_loss", geo_mean_loss, "geo_mean", "seq-mean-token-mean", tis=tis, **clip)
        yield row("policy_gradient_loss", policy_gradient_loss, "gpg", tis=tis)
        yield row("dppo_loss, tv", dppo_loss, "dppo_tv", tis=tis, dppo_ratio_limit=3.0, **clip)
        yield row(
            "dppo_loss, kl", dppo_loss, "dppo_kl", tis=tis, dppo_ratio_limit=3.0, dppo_divergence="kl", **clip
        )
        yield row("dro_loss", dro_loss, "dro", tis=tis, dro_beta=0.3)
        yield row(
            "clip_cov_loss", clip_cov_loss, "clip_cov", tis=tis, clip_cov_ratio=0.5, clip_cov_low=0.3, **clip
        )
        yield row("kl_cov_loss", kl_cov_loss, "kl_cov", tis=tis, kl_cov_ratio=0.1, kl_cov_coef=0.5)


def _our_loss(loss: LossFn, mode: str, options: dict[str, Any], case: Case, *, tis: bool) -> Tensor:
    view = case.weighted(REDUCTIONS[mode])
    view = replace(view, importance=our_weights(TIS, case)) if tis else view
    return case.with_gradient(loss(view, case.advantages, **options)[0])


def _their_loss(name: str, mode: str, case: Case, *, tis: bool) -> Tensor:
    loss, _ = core("get_policy_loss_fn")(name)(
        old_log_prob=case.padded(case.view.old_log_probs),
        log_prob=case.padded(case.view.log_probs),
        advantages=case.padded(case.advantages),
        response_mask=case.mask,
        loss_agg_mode=mode,
        config=_actor_config(),
        rollout_is_weights=_padded_weights(case) if tis else None,
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
    kl = core("kl_penalty")(case.padded(case.view.log_probs), case.padded(case.view.ref_log_probs), kind)
    loss = core("agg_loss")(kl, case.mask, "token-mean")
    return torch.cat([case.trained(case.flat(kl)).detach(), case.with_gradient(loss)])


def _our_reduction(reducer: Reducer, case: Case) -> Tensor:
    loss: Tensor = case.weighted(reducer).reduce(case.view.log_probs)
    return case.with_gradient(loss)


def _their_reduction(mode: str, case: Case) -> Tensor:
    log_probs = case.padded(case.view.log_probs)
    return case.with_gradient(core("agg_loss")(log_probs, case.mask, mode, loss_scale_factor=20.0))


def _our_value_loss(case: Case) -> Tensor:
    loss, _ = value_loss(case.weighted(reducers.token_mean), case.returns, value_loss_scale=0.5)
    return case.with_gradient(loss, of="new_values")


def _their_value_loss(case: Case) -> Tensor:
    loss, _ = core("compute_value_loss")(
        case.padded(case.view.new_values),
        case.padded(case.returns),
        case.padded(case.view.values),
        case.mask,
        0.2,
    )
    return case.with_gradient(loss, of="new_values")


def _our_value_clipfrac(case: Case) -> Tensor:
    view = case.weighted(reducers.token_mean)
    _, metrics = value_loss(view, case.returns, value_clipfrac="larger")
    return metrics["value_clipfrac"].reshape(1)


def _their_value_clipfrac(case: Case) -> Tensor:
    columns = (case.view.new_values, case.returns, case.view.values)
    _, fraction = core("compute_value_loss")(*(case.padded(column) for column in columns), case.mask, 0.2)
    found: Tensor = fraction.reshape(1)
    return found


def _their_grpo_step(case: Case) -> Tensor:
    advantages, _ = core("compute_grpo_outcome_advantage")(
        case.token_rewards, case.mask, case.view.group_ids.numpy()
    )
    log_probs = case.padded(case.view.log_probs)
    config = _actor_config(clip_ratio_high=0.2)
    loss, _ = core("compute_policy_loss_vanilla")(
        case.padded(case.view.old_log_probs), log_probs, advantages, case.mask, "token-mean", config
    )
    kl = core("kl_penalty")(log_probs, case.padded(case.view.ref_log_probs), "low_var_kl")
    return case.with_gradient(loss + KL_COEF * core("agg_loss")(kl, case.mask, "token-mean"))


# Rollout correction.


def _correction() -> Iterator[Row]:
    def weights(name: str, threshold: float | str, differs: str | None = None, **ours: Any) -> Row:
        theirs = {"rollout_is": ours["level"], "rollout_is_threshold": threshold}
        theirs["rollout_is_batch_normalize"] = ours["batch_normalize"]
        return Row("verl", name, partial(our_weights, ours), partial(_their_weights, theirs), differs)

    plain = {name: value for name, value in TIS.items() if name != "level"}
    yield weights("TIS, token", 2.0, level="token", **plain)
    yield weights("TIS, sequence", 2.0, level="sequence", **plain)
    yield weights("TIS, token, batch-normalised", 2.0, level="token", **plain | {"batch_normalize": True})
    yield weights("TIS, sequence, batch-normalised", 2.0, "verl's mean is over samples, ours over tokens",
                  level="sequence", **plain | {"batch_normalize": True})  # fmt: skip
    masked = plain | {"low": 0.5, "mode": "mask"}
    yield weights("IcePop", "0.5_2.0", level="token", **masked)
    yield weights("MIS, sequence", "0.5_2.0", level="sequence", **masked)
    yield Row("verl", "metric tis", _our_mean_weight, _their_mean_weight)
    for level, option in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        yield Row("verl", f"rejection, {level}", partial(_our_kept, level), partial(_their_kept, option))


def _their_weights(options: dict[str, Any], case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    weights, _ = helper.compute_rollout_correction_weights(log_ratio, case.mask, **options)
    return case.trained(case.flat(weights))


def _padded_weights(case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    weights: Tensor = helper.compute_rollout_correction_weights(log_ratio, case.mask, "token", 2.0)[0]
    return weights


def _our_mean_weight(case: Case) -> Tensor:
    return importance_weights(case.view, **TIS, reported="weight")[1]["tis"].reshape(1)


def _their_mean_weight(case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    _, metrics = helper.compute_rollout_correction_weights(log_ratio, case.mask, "token", 2.0)
    return torch.tensor([metrics["rollout_is_mean"]], dtype=case.advantages.dtype)


def _our_rejected(mode: str, case: Case) -> Tensor:
    """Return the whole loss where tokens are rejected, and neither count nor have entropy or KL."""
    *_, correction = grpo(case.view, use_tis=True, use_rs=True, rs_lower_bound=0.8, rs_upper_bound=1.25,
                          rs_count_rejected=False)  # fmt: skip
    view = replace(
        case.view, loss_mask=case.view.loss_mask * correction.kept, importance=correction.importance
    )
    loss, _ = policy_loss(
        replace(case, view=view).weighted(REDUCTIONS[mode], skip_masked=True), case.advantages, eps_clip_high=0.28,
        eps_clip_c=3.0, entropy_coef=0.3, use_kl_loss=True, kl_loss_coef=KL_COEF, kl_loss_type="low_var_kl",
    )  # fmt: skip
    return case.with_gradient(loss)


def _their_rejected(mode: str, case: Case) -> Tensor:
    kept, aggregate, log_probs = (
        case.padded(_their_kept("token_k1", case)),
        core("agg_loss"),
        case.padded(case.view.log_probs),
    )
    loss, _ = core("compute_policy_loss_vanilla")(
        case.padded(case.view.old_log_probs), log_probs, case.padded(case.advantages), kept, mode, _actor_config(),
        _padded_weights(case),
    )  # fmt: skip
    kl = core("kl_penalty")(log_probs, case.padded(case.view.ref_log_probs), "low_var_kl")
    entropy = aggregate(case.padded(case.view.entropy), kept, mode)
    return case.with_gradient(loss - 0.3 * entropy + KL_COEF * aggregate(kl, kept, mode))


def _our_kept(level: Any, case: Case) -> Tensor:
    return case.trained(kept(case.view, level=level, low=0.8, high=1.25, veto=0.0)[0])


def _their_kept(option: str, case: Case) -> Tensor:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = case.padded(case.view.old_log_probs) - case.padded(case.view.rollout_log_probs)
    keep, _ = helper.compute_rollout_rejection_mask(log_ratio, case.mask, option, 1.25)
    return case.flat(keep)
