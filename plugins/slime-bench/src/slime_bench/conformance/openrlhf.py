"""OpenRLHF's functions (0.11.2): losses and KL.

Its package imports deepspeed and flash_attn, which need a GPU to build; its two modules of plain tensor functions
are loaded by file, with an empty `deepspeed` beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from slime_algos import reducers
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.value import value_loss
from slime_algos.numerics import OPENRLHF
from slime_algos.terms.correction import importance_weights, kept
from slime_algos.terms.kl import KL_ESTIMATORS, KlType
from slime_core.protocols import LossFn, Reducer
from torch import Tensor

from slime_bench.conformance.case import GROUPS, Case
from slime_bench.conformance.preset import grpo_step
from slime_bench.conformance.rows import Row

Factor = Callable[[Case], Tensor]
"""Importance weights or rejection [T], which multiply the loss."""


def rows() -> Iterator[Row]:
    """Yield a row for each function that OpenRLHF exposes and we have."""
    peer, clip = "openrlhf", {"eps_clip": 0.2, "eps_clip_high": 0.28}
    tokens, samples = reducers.token_mean, reducers.sample_mean

    def loss(
        name: str, ours: LossFn, reducer: Reducer, options: dict[str, Any], theirs: dict[str, Any],
        factor: Factor | None = None,
    ) -> Row:  # fmt: skip
        return Row(
            peer, name, partial(_our_loss, ours, reducer, options, factor), partial(_their_loss, theirs)
        )

    yield loss("policy_loss, token-mean", policy_loss, tokens, clip, {})
    yield loss("policy_loss, sample-mean", policy_loss, samples, clip, {"token_level_loss": False})
    yield loss("policy_loss, dual clip", policy_loss, tokens, clip | {"eps_clip_c": 3.0}, {"dual_clip": 3.0})
    yield loss("gspo_loss", gspo_loss, samples, clip, {"policy_loss_type": "gspo"})
    yield loss("policy_loss, TIS", policy_loss, tokens, clip, _correction("token", "clip"),
               partial(_weights, "clip"))  # fmt: skip
    yield loss("policy_loss, IcePop", policy_loss, tokens, clip, _correction("token", "mask"),
               partial(_weights, "mask"))  # fmt: skip
    yield loss("policy_loss, rejection of samples", policy_loss, tokens, clip, _correction("seq", "mask"),
               _weights_of_kept_samples)  # fmt: skip
    yield Row(
        peer, "numerics openrlhf: rewards to loss", partial(grpo_step, OPENRLHF, kl=False), _their_grpo_step
    )
    yield Row(peer, "value_loss", _our_value_loss, _their_value_loss)
    kinds: tuple[KlType, ...] = ("k1", "k2", "k3")
    for kind in kinds:
        yield Row(peer, f"KL {kind}, held within ±10", partial(_our_kl, kind), partial(_their_kl, kind))


def _correction(level: str, mode: str) -> dict[str, Any]:
    return {
        "is_correction_level": level,
        "is_correction_mode": mode,
        "is_correction_threshold": [0.8, 1.25],
    }


def _our_loss(
    loss: LossFn, reducer: Reducer, options: dict[str, Any], factor: Factor | None, case: Case
) -> Tensor:
    view = case.weighted(reducer)
    view = view if factor is None else dataclasses.replace(view, importance=factor(case))
    return case.with_gradient(loss(view, case.advantages, **options)[0])


def _weights(mode: Literal["clip", "mask"], case: Case) -> Tensor:
    return importance_weights(case.view, level="token", mode=mode, low=0.8, high=1.25, batch_normalize=False)[
        0
    ]


def _weights_of_kept_samples(case: Case) -> Tensor:
    weights, _ = importance_weights(
        case.view, level="token", mode="clip", low=0.0, high=math.inf, batch_normalize=False
    )
    return weights * kept(case.view, level="geometric", low=0.8, high=1.25, veto=0.0)[0]


def _their_loss(options: dict[str, Any], case: Case) -> Tensor:
    module = _module("loss")
    loss, *_ = module.PolicyLoss(**({"clip_eps_high": 0.28} | options))(
        case.padded(case.view.log_probs),
        case.padded(case.view.old_log_probs),
        case.padded(case.advantages),
        case.mask,
        rollout_log_probs=case.padded(case.view.rollout_log_probs),
    )
    return case.with_gradient(loss)


def _their_grpo_step(case: Case) -> Tensor:
    """Normalise as `RemoteExperienceMaker.compute_advantages_and_returns` does, in lines that no function holds."""
    rewards = case.view.rewards.view(len(set(GROUPS)), -1)
    credits = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
    advantages = credits.flatten()[case.view.sample_of_token]
    return _their_loss({"clip_eps_high": 0.2}, dataclasses.replace(case, advantages=advantages))


def _our_value_loss(case: Case) -> Tensor:
    loss, _ = value_loss(case.weighted(reducers.token_mean), case.returns, value_loss_scale=0.5)
    return case.with_gradient(loss, of="new_values")


def _their_value_loss(case: Case) -> Tensor:
    columns = (case.view.new_values, case.view.values, case.returns)
    loss = _module("loss").ValueLoss(clip_eps=0.2)(*(case.padded(column) for column in columns), case.mask)
    return case.with_gradient(loss, of="new_values")


def _our_kl(kind: KlType, case: Case) -> Tensor:
    """Return the estimate, held within ±10 as OpenRLHF holds each; of ours, `low_var_kl` alone is cut off."""
    return KL_ESTIMATORS[kind](case.view.log_probs - case.view.ref_log_probs).detach().clamp(-10, 10)


def _their_kl(kind: str, case: Case) -> Tensor:
    kl: Tensor = _module("utils").compute_approx_kl(
        case.view.log_probs, case.view.ref_log_probs, kl_estimator=kind
    )
    return kl.detach()


@functools.cache
def _module(name: str) -> Any:
    """Load openrlhf/models/<name>.py without running its packages' own imports."""
    package = importlib.util.find_spec("openrlhf")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'openrlhf'", name="openrlhf")
    folder = Path(next(iter(package.submodule_search_locations))) / "models"
    parent = "slime_algos.conformance._openrlhf_models"
    if parent not in sys.modules:
        holder = types.ModuleType(parent)
        holder.__path__ = [str(folder)]
        sys.modules[parent] = holder
    absent = "deepspeed" not in sys.modules and importlib.util.find_spec("deepspeed") is None
    if absent:
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    try:
        return importlib.import_module(f"{parent}.{name}")
    finally:
        if absent:
            del sys.modules["deepspeed"]
