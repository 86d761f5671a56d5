"""verl's estimators (0.9.1), and the adaptive KL coefficient."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from slime_algos.advantages.gdpo import gdpo
from slime_algos.advantages.gpg import gpg
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.grpo_passk import grpo_passk
from slime_algos.advantages.opo import opo
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.advantages.ppo import ppo
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from slime_algos.advantages.remax import remax
from slime_algos.advantages.rloo import rloo
from slime_algos.greedy_baseline import IS_BASELINE
from slime_algos.reward_transforms import gpg as gpg_transform
from slime_algos.reward_transforms import group_centre, leave_one_out, pass_at_k
from slime_algos.terms.correction import importance_weights
from slime_core.protocols import AdvantageEstimator, TokenView
from slime_core.rewards.transforms import group_norm
from torch import Tensor

from slime_bench.conformance.case import PARTS, Case
from slime_bench.conformance.rows import Row

Transform = Callable[..., Any]

TIS: dict[str, Any] = {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0, "batch_normalize": False}
KL_TARGETS = (0.05, 0.9, 1.05, 5.0)
KL_HORIZON = 100.0


def core(name: str) -> Any:
    """Return a function of verl's core algorithms."""
    return getattr(importlib.import_module("verl.trainer.ppo.core_algos"), name)


def rows() -> Iterator[Row]:
    """Yield a row for each estimator that verl exposes."""
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
    for name, weights, unscaled_std in (
        ("gdpo", None, False),
        ("gdpo, weighted", (1.0, 0.25, -0.5), False),
        ("gdpo, without std", (1.0, 0.25, -0.5), True),
    ):
        yield Row(
            "verl",
            name,
            partial(_our_gdpo, weights, unscaled_std),
            partial(_their_gdpo, weights, unscaled_std),
        )
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
    function = core(name)
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
    metadata = [{IS_BASELINE: is_baseline} for is_baseline in greedy.tolist()]
    view = TokenView(**(vars(case.view) | {"loss_mask": mask, "train_metadata": metadata}))
    return replace(case, view=view), case.view.rewards[first]


def _our_remax(case: Case) -> Tensor:
    masked, _ = _without_the_first(case)
    return masked.trained(remax(masked.view)[0])


def _their_remax(case: Case) -> Tensor:
    masked, baselines = _without_the_first(case)
    advantages, _ = core("compute_remax_outcome_advantage")(masked.token_rewards, baselines, masked.mask)
    return masked.trained(masked.flat(advantages))


def _our_gdpo(weights: tuple[float, ...] | None, unscaled: bool, case: Case) -> Tensor:
    view = case.rewarded(group_norm, disable_grpo_std_normalization=unscaled)
    chosen = dict(zip(PARTS, weights or (1.0,) * len(PARTS), strict=True))
    return case.trained(gdpo(view, gdpo_weights=chosen, normalize_advantages=True)[0])


def _their_gdpo(weights: tuple[float, ...] | None, unscaled: bool, case: Case) -> Tensor:
    config = {"gdpo_reward_keys": list(PARTS)} | ({} if weights is None else {"gdpo_reward_weights": weights})
    responses = case.padded(torch.ones_like(case.view.loss_mask)).long()
    prompts = torch.ones(len(responses), 1, dtype=torch.int64)
    advantages, _ = core("compute_gdpo_outcome_advantage")(
        case.token_rewards,
        case.mask,
        case.view.group_ids.numpy(),
        norm_adv_by_std_in_grpo=not unscaled,
        config=config,
        non_tensor_batch={name: values.numpy() for name, values in case.view.reward_parts.items()},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, responses], dim=1)},
    )
    return case.trained(case.flat(advantages))


def _as_one_turn(case: Case, whole: bool) -> Case:
    """Return the case; if `whole`, every token is trained on: verl's form for one turn knows no holes."""
    ones = torch.ones_like(case.view.loss_mask)
    return replace(case, view=replace(case.view, loss_mask=ones)) if whole else case


def _our_token_baseline(whole: bool, weighted: bool, case: Case) -> Tensor:
    case = _as_one_turn(case, whole)
    advantages, returns, *_ = optimal_token_baseline(case.view, use_tis=weighted)
    return torch.cat([case.trained(advantages), case.trained(returns)])


def _their_token_baseline(name: str, whole: bool, weighted: bool, case: Case) -> Tensor:
    case = _as_one_turn(case, whole)
    found = core(name)(
        case.token_rewards,
        case.mask,
        case.view.group_ids.numpy(),
        case.padded(case.view.old_log_probs),
        case.padded(case.view.sum_pi_squared),
        rollout_is_weights=case.padded(our_weights(TIS, case)) if weighted else None,
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
    controller = core("AdaptiveKLController")(0.2, 0.0, KL_HORIZON)
    masked_mean = importlib.import_module("verl.utils.torch_functional").masked_mean
    old, ref = (case.padded(getattr(case.view, name)) for name in ("old_log_probs", "ref_log_probs"))
    found: list[float] = []
    for target in KL_TARGETS:
        controller.target = target
        kl = float(masked_mean(core("kl_penalty")(old, ref, "mse") * case.mask, case.mask, axis=-1).mean())
        before = controller.value
        controller.update(kl, len(case.view.rewards))
        found += [kl, before, float(controller.value)]
    return torch.tensor(found, dtype=torch.float64)


def our_weights(options: dict[str, Any], case: Case) -> Tensor:
    """Return our importance weights [T], 0 where the mask is."""
    return case.trained(importance_weights(case.view, **options)[0])
