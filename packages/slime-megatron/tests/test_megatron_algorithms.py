"""The algorithms of slime-algos on the real trainer: the step's cut into micro-batches is invisible to them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, update_wrapper
from importlib.metadata import entry_points
from inspect import signature

import numpy as np
import pytest
from slime_algos.advantages.gdpo import gdpo
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.opo import opo
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.sapo import sapo_loss
from slime_core.assemble import Algorithm
from slime_core.protocols import needs_of
from slime_megatron.trainer import FILLED

from .conftest import make_batch


def chosen(function, **options):
    return update_wrapper(partial(function, **options), function), needs_of(function, options)


def test_the_trainer_fills_what_every_estimator_and_loss_reads():
    for group in ("slime.advantages", "slime.losses"):
        for plugin in entry_points(group=group):
            function = plugin.load()
            everything_on = dict.fromkeys(signature(function).parameters, True)
            assert needs_of(function, everything_on) <= FILLED | {"new_values"}, plugin.name


@pytest.mark.parametrize(
    ("estimator", "credit", "loss", "options"),
    [
        (grpo, {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True}, gspo_loss, {"eps_clip": 0.01}),
        (opo, {"use_rs": True, "rs_lower_bound": 0.01, "rs_upper_bound": 50.0}, geo_mean_loss, {}),
        (grpo, {"normalize_advantages": True}, policy_loss, {"use_opsm": True, "entropy_coef": 0.1}),
        (grpo, {}, cispo_loss, {}),
        (grpo, {}, sapo_loss, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_micro_batches_change_no_metric_of_two_optimizer_steps(
    make_learner, estimator, credit, loss, options
):
    (estimate, reads), (bound, needs) = chosen(estimator, **credit), chosen(loss, **options)
    algorithm = Algorithm(estimate, bound, reads | needs, estimator.reward_transform)
    found = []
    for max_tokens in (1000, 20):
        metrics = make_learner(algorithm, max_tokens_per_gpu=max_tokens).train(make_batch(n_steps=2))
        found.append({name: value for name, value in metrics.items() if name.startswith("train/")})
    whole, cut = found
    assert whole["train/ppo_kl"] != 0  # the second step is off-policy
    assert cut == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_parts_of_rewards_train_as_their_weighted_sum(make_learner):
    batch = make_batch()
    whole, first = batch.rewards, np.arange(len(batch), dtype=np.float32)
    parts = {"first": first, "second": whole - first}
    (estimate, reads), (loss, needs) = (
        chosen(gdpo, gdpo_weights={"first": 0.5, "second": 0.5}),
        chosen(policy_loss),
    )
    by_parts = make_learner(Algorithm(estimate, loss, reads | needs, "group-norm"))
    found = by_parts.train(replace(batch, rewards=np.zeros_like(whole), reward_parts=parts))
    by_score = make_learner(Algorithm(grpo, loss, needs, "group-norm"))
    expected = by_score.train(replace(batch, rewards=whole / 2))
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
