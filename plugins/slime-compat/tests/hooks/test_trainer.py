"""Functions inside the trainer: in runs of Megatron's trainer over a tiny random model, and the numbers that they give."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from slime_compat.adapters.attributes import computes_with_logits
from slime_compat.adapters.training import ReferenceCorrection, ReferenceLoss, ReferenceReducer
from slime_core.errors import PluginError
from slime_core.protocols import ReductionView, TokenView


def test_every_hook_of_the_trainer_is_called_as_there(with_megatron):
    flags = ["--custom-megatron-init-path", "trainer_hooks.init"]
    flags += ["--custom-megatron-before-log-prob-hook-path", "trainer_hooks.before_log_prob"]
    flags += ["--custom-megatron-before-train-step-hook-path", "trainer_hooks.before_train_step"]
    flags += ["--rollout-data-postprocess-path", "trainer_hooks.postprocess"]
    flags += ["--custom-pg-loss-reducer-function-path", "trainer_hooks.dr_grpo_reducer"]
    flags += ["--custom-tis-function-path", "trainer_hooks.mis", "--use-tis"]
    flags += ["--custom-advantage-function-path", "trainer_hooks.advantages"]
    flags += ["--custom-update-weight-post-write-path", "trainer_hooks.post_write"]
    run = with_megatron(*flags, "--update-weight-transport", "disk", "--num-steps-per-rollout", "2")
    seen = sys.modules["trainer_hooks"].SEEN
    assert seen[0] == ("init", 0, 1, 1e-3)
    assert ("log_prob", 1, "") in seen
    assert [one for one in seen if one[0] == "train_step"] == [("train_step", 0, i, True) for i in range(2)]
    assert ("postprocess", 0, 16) in seen
    written = [one for one in seen if one[0] == "post_write"]
    assert len(written) == 2 and "config.json" in written[0][1] and written[0][2] == []
    assert run.rows[-1]["train/mis_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_run_weighs_the_losses_of_custom_advantages(with_megatron):
    flags = ["--custom-advantage-function-path", "own_advantages.of_rewards", "--normalize-advantages"]
    row = with_megatron(*flags, "--use-tis", "--use-rs").rows[-1]
    assert row["train/tis"] == pytest.approx(1.0, abs=1e-3)  # engine and trainer have the same weights
    assert row["train/ois"] == pytest.approx(1.0, abs=1e-3)  # which is reported where a loss is weighed


def test_a_critic_learns_the_returns_of_a_custom_advantage_function(with_megatron):
    flags = ["--advantage-estimator", "ppo", "--custom-advantage-function-path"]
    row = with_megatron(*flags, "own_advantages.less_values").rows[-1]
    # A new critic says 0: advantages are rewards of 0 and 1, and the error's square is the reward.
    assert row["train/mean/values"] == 0.0
    assert row["train/mean/advantages"] == row["train/mean/returns"] == row["train/mean/rewards"]
    assert row["train/critic/value_loss"] == pytest.approx(row["train/mean/rewards"], abs=1e-6)
    assert row["train/mean/rewards"] > 0


def test_a_custom_loss_takes_log_probs_in_the_place_of_logits(with_megatron):
    run = with_megatron("--custom-loss-function-path", "trainer_hooks.reinforce")
    row = run.rows[-1]
    assert row["train/own_loss"] == pytest.approx(row["train/loss"], rel=1e-5)


def test_log_probs_of_logits_have_the_same_gradient(with_megatron):
    flags = ["--rollout-temperature", "0.8", "--run-name"]
    one = with_megatron("--custom-loss-function-path", "trainer_hooks.reinforce", *flags, "a").rows[-1]
    other = with_megatron("--custom-loss-function-path", "logits_losses.reinforce", *flags, "b").rows[-1]
    assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-6)
    assert other["train/own_loss"] == pytest.approx(one["train/own_loss"], rel=1e-6, abs=1e-8)


def test_losses_of_logits_run_unchanged_and_fall(with_megatron):
    flags = ["--lr", "1e-2", "--rollout-seed", "1", "--num-rollout", "2", "--custom-loss-function-path"]
    for loss, metric in (("distil", "forward_kl"), ("z_loss", "z")):
        first, last = with_megatron(*flags, f"logits_losses.{loss}", "--run-name", loss).rows
        assert first["train/grad_norm"] > 0 and last[f"train/{metric}"] < first[f"train/{metric}"]
    for row in with_megatron(*flags, "logits_losses.preferences").rows:
        # With one optimizer step nothing has become likelier yet, whatever is preferred; the gradient says what is.
        assert row["train/preference_loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert row["train/grad_norm"] > 0


def test_logits_are_asked_for_only_by_functions_that_compute_with_them():
    import logits_losses
    import trainer_hooks

    wanted = {"reinforce": True, "preferences": True, "distil": True, "z_loss": True, "handed_on": False}
    assert {name: computes_with_logits(getattr(logits_losses, name)) for name in wanted} == wanted
    assert not computes_with_logits(trainer_hooks.reinforce)
    needs = ReferenceLoss(path="logits_losses:distil").needs({})
    assert "sequence_logits" in needs and "entropy" not in needs


def test_the_weights_of_a_reducer_are_what_it_multiplies_losses_with():
    reducer = ReferenceReducer(path="trainer_hooks:dr_grpo_reducer", run_args=None)
    reducer._theirs.args.calculate_per_token_loss = False
    mask = np.array([1.0, 0.0, 1.0, 1.0, 1.0])
    view = ReductionView(loss_mask=mask, response_lengths=np.array([2, 3]), rollout_ids=np.array([0, 1]))
    assert reducer(view).tolist() == (mask / 10.0 / 2).tolist()


def test_a_reducer_finds_one_context_parallel_rank_where_megatron_is_not_set_up():
    import constant_divisor
    from megatron.core import mpu

    reducer = ReferenceReducer(path="constant_divisor:get_pg_loss_reducer", run_args=None)
    reducer._theirs.args.calculate_per_token_loss = False
    mask = np.array([1.0, 0.0, 1.0])
    view = ReductionView(loss_mask=mask, response_lengths=np.array([2, 1]), rollout_ids=np.array([0, 1]))
    assert reducer(view).tolist() == (mask / 8.0 / 2).tolist()  # its divisor, and two executions
    assert constant_divisor.mpu is mpu


def test_a_correction_weighs_and_rejects():
    import torch

    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -1.5, -3.0, -3.0])
    view = TokenView(
        offsets=torch.tensor([0, 2, 4]), sample_of_token=torch.tensor([0, 0, 1, 1]), loss_mask=torch.ones(4),
        weights=torch.ones(4), rewards=torch.zeros(2), old_log_probs=old, rollout_log_probs=rollout,
    )  # fmt: skip
    correction, metrics = ReferenceCorrection(path="trainer_hooks:mis")(view)
    assert correction.importance.tolist() == pytest.approx([1.0, np.exp(0.5), 2.0, 2.0])
    assert correction.kept.tolist() == [True, True, False, False]
    assert float(metrics["mis_ratio"]) == pytest.approx((1 + np.exp(0.5) + 4) / 4)
    with pytest.raises(PluginError, match="twice the loss did not come back as twice the result"):
        ReferenceCorrection(path="trainer_hooks:adds")(view)
