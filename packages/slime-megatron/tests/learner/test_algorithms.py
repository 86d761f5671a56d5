"""The algorithms of slime-algos on the real trainer: the step's cut into micro-batches is invisible to them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, update_wrapper
from importlib.metadata import entry_points
from inspect import signature

import numpy as np
import pytest
import torch
from slime_algos.advantages.gdpo import gdpo
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.opo import opo
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.reducers import token_mean
from slime_core.errors import PluginError, TrainerError
from slime_core.protocols import needs_of
from slime_core.protocols.correction import Correction
from slime_core.run.assemble import Algorithm
from slime_megatron.trainer import FILLED

from ..batches import make_batch


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


def correcting(loss, reducer=token_mean, **options):
    """Return the algorithm of `grpo` with a correction, and the list of views that its loss sees."""
    (estimate, reads), (bound, needs) = chosen(grpo, **options), chosen(loss)
    views = []

    def seen(view, advantages):
        views.append(view)
        return bound(view, advantages)

    seen = update_wrapper(seen, loss)
    return Algorithm(estimate, seen, reads | needs, "group-norm", reducer=reducer), views


@pytest.mark.parametrize("count_rejected", [True, False])
def test_rejected_tokens_reach_no_loss(make_learner, count_rejected):
    options = {"use_tis": True, "use_rs": True, "rs_lower_bound": 1.0, "rs_upper_bound": 1e9}
    reducer = partial(token_mean, skip_masked=True)
    algorithm, views = correcting(dro_loss, reducer, rs_count_rejected=count_rejected, **options)
    batch = make_batch(n_steps=2)
    learner = make_learner(algorithm, max_tokens_per_gpu=1000)
    metrics = learner.train(batch)
    assert 0.1 < metrics["train/rs_rejected"] < 0.9
    mask = torch.cat([view.loss_mask for view in views])
    weights = torch.cat([view.weights for view in views])
    n_trained = int(batch.loss_mask.sum())
    assert mask.sum().item() == pytest.approx(n_trained * (1 - metrics["train/rs_rejected"]), rel=1e-5)
    assert (weights[mask == 0] == 0).all()
    assert all(view.importance is not None for view in views)
    total = weights.sum().item()
    if count_rejected:
        assert 0 < total < batch.weights.sum() - 0.1
    else:
        assert total == pytest.approx(2)  # the weights of either step add up to 1


def test_rejected_tokens_that_do_not_count_are_weighed_anew():
    from slime_megatron.batch.token_columns import TokenColumns  # not above: it imports Megatron

    batch = make_batch(n_steps=2)
    algorithm, _ = correcting(dro_loss)
    kept = torch.arange(len(batch.loss_mask)) % 3 > 0
    columns = TokenColumns.of(batch, torch.device("cpu"))
    found = columns.corrected(batch, Correction(kept=kept, count_rejected=False), algorithm)
    owner = np.repeat(np.arange(len(batch)), batch.response_lengths)
    for step in batch.optimizer_steps:
        own = np.isin(owner, step)
        left = (batch.loss_mask * kept.numpy())[own]
        sizes = [max(1.0, left[owner[own] == i].sum()) for i in step]
        assert found.weights.numpy()[own] == pytest.approx(left / sum(sizes))
    assert torch.equal(columns.corrected(batch, Correction(), algorithm).weights, columns.weights)
    with pytest.raises(TrainerError, match=r"wanted `Algorithm.reducer`"):
        columns.corrected(
            batch, Correction(kept=kept, count_rejected=False), replace(algorithm, reducer=None)
        )


def test_a_loss_of_a_strangers_own_is_not_trained_uncorrected(make_learner):
    def plain(view, advantages):
        return view.reduce(-(view.log_probs - view.old_log_probs).exp() * advantages), {}

    algorithm, views = correcting(plain, use_tis=True)
    with pytest.raises(PluginError, match=r"'plain' does not apply the importance weights"):
        make_learner(algorithm).train(make_batch())
    assert not views
