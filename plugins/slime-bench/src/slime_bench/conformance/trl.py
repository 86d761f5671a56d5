"""TRL's functions (1.16): the losses of `GRPOTrainer._compute_loss`, and its off-policy mask.

The method reads settings of the trainer and asks the model for log-probs; both are given by a plain object here.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from slime_algos import reducers
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.numerics import TRL
from slime_algos.terms.correction import importance_weights
from slime_core.protocols import LossFn, Reducer
from torch import Tensor

from slime_bench.conformance.case import GROUPS, Case
from slime_bench.conformance.preset import KL_COEF, grpo_step
from slime_bench.conformance.rows import Row

MAX_COMPLETION_LENGTH = 20


def rows() -> Iterator[Row]:
    """Yield a row for each loss that TRL exposes and we have."""
    clip: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}
    constant: Reducer = partial(reducers.constant, loss_scale_factor=MAX_COMPLETION_LENGTH)

    def row(
        name: str, ours: LossFn, reducer: Reducer, options: dict[str, Any], loss_type: str,
        differs: str | None = None, **settings: Any,
    ) -> Row:  # fmt: skip
        theirs = partial(_their_loss, loss_type, settings)
        return Row("trl", name, partial(_our_loss, ours, reducer, options), theirs, differs)

    yield row("policy_loss, loss_type grpo", policy_loss, reducers.sample_mean, clip, "grpo")
    yield row("policy_loss, loss_type bnpo", policy_loss, reducers.token_mean, clip, "bnpo")
    yield row("policy_loss, loss_type dapo", policy_loss, reducers.token_mean, clip, "dapo")
    yield row("policy_loss, loss_type dr_grpo", policy_loss, constant, clip, "dr_grpo")
    yield row("gspo_loss, loss_type grpo", gspo_loss, reducers.sample_mean, clip, "grpo",
              importance_sampling_level="sequence")  # fmt: skip
    yield row("gspo_loss, loss_type luspo", gspo_loss, reducers.sequence_sum, clip, "luspo",
              importance_sampling_level="sequence")  # fmt: skip
    yield row("cispo_loss", cispo_loss, reducers.token_mean, {"eps_clip": 1.0, "eps_clip_high": 0.28}, "cispo",
              epsilon_high=1.28)  # fmt: skip
    yield row("sapo_loss", sapo_loss, reducers.sample_mean, {}, "sapo",
              differs="TRL holds the temperature 1.05 in float32")  # fmt: skip
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    yield row("policy_loss, KL k3", policy_loss, reducers.token_mean, clip | kl, "dapo", beta=0.1)
    yield row("policy_loss, unbiased KL", policy_loss, reducers.token_mean, clip | kl | {"use_unbiased_kl": True},
              "dapo", beta=0.1, use_bias_correction_kl=True)  # fmt: skip
    yield row("policy_loss, entropy", policy_loss, reducers.token_mean, clip | {"entropy_coef": 0.3}, "dapo",
              entropy_coef=0.3)  # fmt: skip
    yield row("policy_loss, off-policy sequence mask", policy_loss, reducers.token_mean,
              clip | {"use_opsm": True, "opsm_delta": 0.05}, "dapo", off_policy_mask_threshold=0.05)  # fmt: skip
    yield Row("trl", "numerics trl: rewards to loss", partial(grpo_step, TRL), _their_grpo_step)
    for name, loss, level in (("policy_loss", policy_loss, "token"), ("gspo_loss", gspo_loss, "sequence")):
        settings = {"with_importance_weights": True, "importance_sampling_level": level}
        yield Row("trl", f"{name}, importance weights", partial(_our_corrected_loss, loss),
                  partial(_their_loss, "dapo", settings))  # fmt: skip


def _our_loss(loss: LossFn, reducer: Reducer, options: dict[str, Any], case: Case) -> Tensor:
    return case.with_gradient(loss(case.weighted(reducer), case.advantages, **options)[0])


def _our_corrected_loss(loss: LossFn, case: Case) -> Tensor:
    weights, _ = importance_weights(
        case.view, level="token", mode="clip", low=0.0, high=2.0, batch_normalize=False
    )
    view = replace(case.weighted(reducers.token_mean), importance=weights)
    return case.with_gradient(loss(view, case.advantages, eps_clip=0.2, eps_clip_high=0.28)[0])


def _their_loss(loss_type: str, settings: dict[str, Any], case: Case) -> Tensor:
    trainer = importlib.import_module("trl").GRPOTrainer
    mask, log_probs = case.mask, case.padded(case.view.log_probs)
    weights = (case.view.old_log_probs - case.view.rollout_log_probs).exp().clamp(max=2.0)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": case.advantages[case.view.offsets[:-1]],
        "old_per_token_logps": case.padded(case.view.old_log_probs),
        "ref_per_token_logps": case.padded(case.view.ref_log_probs),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": case.padded(weights),
    }
    fake = _trainer(trainer, loss_type, settings, (log_probs, case.padded(case.view.entropy), None))
    loss = trainer._compute_loss(fake, None, inputs)
    return case.with_gradient(loss)


def _their_grpo_step(case: Case) -> Tensor:
    """Normalise with TRL's `nanstd` as its trainer does, in the lines of it that no function holds."""
    rewards = case.view.rewards.view(len(set(GROUPS)), -1)
    deviation = importlib.import_module("trl.trainer.utils").nanstd(rewards, dim=1, keepdim=True)
    credits = ((rewards - rewards.nanmean(1, keepdim=True)) / (deviation + 1e-4)).flatten()
    advantages = credits[case.view.sample_of_token]
    settings = {"beta": KL_COEF, "epsilon_high": 0.2}
    return _their_loss("dapo", settings, replace(case, advantages=advantages))


def _trainer(trainer: Any, loss_type: str, settings: dict[str, Any], answers: tuple[Any, ...]) -> Any:
    """Return what `_compute_loss` reads of a trainer."""
    beta = settings.get("beta", 0.0)
    entropy_coef = settings.get("entropy_coef", 0.0)
    corrected = settings.get("with_importance_weights", False)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: answers,
        get_off_policy_mask=trainer.get_off_policy_mask,
        loss_type=loss_type,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=settings.get("epsilon_high", 0.28),
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=MAX_COMPLETION_LENGTH,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _entropy_bonus_enabled=entropy_coef != 0,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        _metrics={"train": defaultdict(list)},
    )
