"""What the trainer tells of a step: means of columns, and the work of its passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from slime_megatron.batch.trees.flops import forward_flops
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.settings.section_roles import RolesSection

from ..algorithms import policy_gradient
from ..batches import hf_log_probs, make_batch


def test_means_are_of_trained_tokens_sample_by_sample(make_learner, qwen3):
    reference, _ = qwen3
    batch = make_batch()
    learner = make_learner(
        policy_gradient("ref_log_probs"), settings={"roles": RolesSection(ref_update_interval=1)}
    )
    told = learner.train(batch)
    log_probs, of_samples = hf_log_probs(reference, batch).detach().numpy(), []
    for begin, end in zip(batch.response_offsets, batch.response_offsets[1:], strict=False):
        kept = batch.loss_mask[begin:end] > 0
        of_samples.append(log_probs[begin:end][kept].mean() if kept.any() else 0.0)
    assert told["train/mean/log_probs"] == pytest.approx(np.mean(of_samples), rel=1e-4)
    assert told["train/mean/ref_log_probs"] == pytest.approx(np.mean(of_samples), rel=1e-4)
    assert told["train/mean/rewards"] == pytest.approx(batch.rewards.mean(), rel=1e-5)
    trained = np.array(
        [
            batch.loss_mask[b:e].any()
            for b, e in zip(batch.response_offsets, batch.response_offsets[1:], strict=False)
        ]
    )
    assert told["train/mean/advantages"] == pytest.approx((batch.rewards * trained).mean(), rel=1e-5)
    assert told["perf/ref_log_probs_time"] <= told["perf/log_probs_time"]
    assert told["perf/ref_model_update_time"] > 0


def test_samples_that_are_in_no_optimizer_step_do_not_count(make_learner):
    batch = make_batch()
    batch = replace(batch, optimizer_steps=(np.array([0, 2]),))
    told = make_learner().train(batch)
    assert told["train/mean/rewards"] == pytest.approx(batch.rewards[[0, 2]].mean(), rel=1e-5)
    assert np.isfinite(told["train/mean/log_probs"])


def test_work_is_that_of_the_samples_trees(make_learner):
    batch = make_batch()
    learner = make_learner(max_tokens_per_gpu=40)
    told = learner.train(batch)
    trees = (TokenTree.of_sample(batch, i) for i in range(len(batch)))
    wanted = sum(forward_flops(learner._architecture, tree) for tree in trees)
    assert told["perf/forward_tflop"] == pytest.approx(wanted / 1e12, rel=1e-12)
