"""Optimizer steps: gradients, micro-batches, old log-probs, skipped steps, metrics."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.errors import CheckpointError, TrainerError
from slime_core.run.assemble import Algorithm
from slime_megatron.settings.section import MegatronSection
from slime_models.family.families.glm4_moe import GLM4_MOE

from ..algorithms import policy_gradient
from ..batches import hf_log_probs, make_batch
from ..comparison import gradients_of, near, relative, shared_prompts
from ..host_copies import on_host
from ..views import recording


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_gradients_are_those_of_transformers_and_autograd(make_learner, qwen3, temperature):
    reference, folder = qwen3
    batch = make_batch(temperature=temperature)
    learner = make_learner(max_tokens_per_gpu=40)
    metrics = learner.train(batch)
    log_probs = hf_log_probs(reference, batch)
    weights = torch.from_numpy(batch.weights)
    advantages = torch.from_numpy(np.repeat(batch.rewards, batch.response_lengths))
    loss = (weights * -(log_probs - log_probs.detach()).exp() * advantages).sum()
    reference.zero_grad()
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert relative(gradients_of(learner, folder), wanted) <= near(1e-5)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=near(1e-5))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in wanted.values()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=near(1e-5))
    mask = torch.from_numpy(batch.loss_mask)
    difference = (log_probs.detach() - torch.from_numpy(batch.rollout_log_probs)).abs()
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(
        float((difference * mask).sum() / mask.sum()), rel=near(1e-5)
    )


def test_gradients_of_dense_layers_experts_and_a_shared_one_are_those_of_transformers(
    make_learner, cut_models
):
    """transformers has all experts of a layer in one parameter."""
    from transformers import AutoModelForCausalLM

    folder, batch = cut_models["glm4_moe"], make_batch()
    learner = make_learner(folder=folder, max_tokens_per_gpu=40)
    learner.train(batch)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    advantages = torch.from_numpy(np.repeat(batch.rewards, batch.response_lengths))
    (torch.from_numpy(batch.weights) * -hf_log_probs(reference, batch) * advantages).sum().backward()
    wanted = {}
    for name, parameter in reference.named_parameters():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for i, gradient in enumerate(parameter.grad if stem.endswith(".experts.") else ()):
            parts = ["gate_proj", "up_proj"] if name.endswith("gate_up_proj") else ["down_proj"]
            for part, own in zip(parts, gradient.chunk(len(parts)), strict=True):
                wanted[f"{stem}{i}.{part}.weight"] = own
        if not stem.endswith(".experts."):
            wanted[name] = parameter.grad
    assert relative(gradients_of(learner, folder, GLM4_MOE), wanted) <= near(1e-5)


def test_micro_batches_change_neither_loss_nor_gradient(make_learner, qwen3):
    batch = make_batch()
    found = []
    for max_tokens in (1000, 40, 20):
        learner = make_learner(max_tokens_per_gpu=max_tokens)
        metrics = learner.train(batch)
        found.append((metrics["train/loss"], gradients_of(learner, qwen3[1])))
    (loss, gradients), *others = found
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, abs=near(1e-6))
        assert relative(other, gradients) <= near(1e-6) * 3  # float32 sums in another order


@pytest.mark.parametrize("max_tokens", [1000, 25, 12])
def test_shared_prompts_change_neither_loss_nor_gradient(make_learner, qwen3, max_tokens):
    batch = shared_prompts()
    found = []
    for share in (False, True):
        learner = make_learner(megatron=MegatronSection(share_prefix=share), max_tokens_per_gpu=max_tokens)
        found.append((learner.train(batch), gradients_of(learner, qwen3[1])))
    (apart, wanted), (together, gradients) = found
    assert relative(gradients, wanted) <= near(1e-5)
    assert together["train/loss"] == pytest.approx(apart["train/loss"], abs=near(1e-6))
    assert apart["perf/forwarded_tokens"] == len(batch.tokens) - len(batch)
    if max_tokens == 1000:  # 2 of 3 prompts of 5 tokens and 1 of 2 of 7 are saved
        assert together["perf/forwarded_tokens"] == apart["perf/forwarded_tokens"] - 2 * 5 - 7


def test_recomputed_layers_give_the_same_gradients(make_learner, qwen3):
    found = []
    for granularity in (None, "full", "selective"):
        learner = make_learner(megatron=MegatronSection(recompute_granularity=granularity))
        learner.train(make_batch())
        found.append(gradients_of(learner, qwen3[1]))
    assert relative(found[1], found[0]) == relative(found[2], found[0]) == 0


def test_one_step_takes_its_own_log_probs_as_the_old_ones(make_learner):
    algorithm, views = recording()
    metrics = make_learner(algorithm).train(make_batch())
    assert all(
        torch.equal(view.old_log_probs, view.log_probs) and not view.old_log_probs.requires_grad
        for view in views
    )
    assert metrics["perf/log_probs_time"] < metrics["perf/actor_train_time"] / 4


def test_old_log_probs_of_later_steps_are_from_before_the_first(make_learner, qwen3):
    batch = make_batch(n_steps=3)
    algorithm, views = recording()
    metrics = make_learner(algorithm).train(batch)
    wanted = hf_log_probs(qwen3[0], batch).detach()
    assert len(views) == 3
    for step, view in zip(batch.optimizer_steps, views, strict=True):
        own = torch.cat([wanted[batch.response_offsets[i] : batch.response_offsets[i + 1]] for i in step])
        torch.testing.assert_close(
            view.old_log_probs.sort().values, own.sort().values, rtol=0, atol=near(1e-5)
        )
    assert torch.equal(views[0].log_probs, views[0].old_log_probs)
    assert (views[2].log_probs - views[2].old_log_probs).abs().max() > 1e-3  # lr 1e-3 moved the weights
    difference = (wanted - torch.from_numpy(batch.rollout_log_probs)).abs() * torch.from_numpy(
        batch.loss_mask
    )
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(
        float(difference.sum()) / batch.loss_mask.sum(), rel=near(1e-5)
    )


def test_an_estimator_that_needs_old_log_probs_gets_those_of_the_whole_batch(make_learner, qwen3):
    batch = make_batch()
    seen = []

    def estimator(view):
        seen.append(on_host(view))
        return view.old_log_probs, view.old_log_probs

    algorithm = Algorithm(estimator, policy_gradient().loss, frozenset({"old_log_probs"}), "raw")
    make_learner(algorithm).train(batch)
    (view,) = seen
    torch.testing.assert_close(
        view.old_log_probs, hf_log_probs(qwen3[0], batch).detach(), rtol=0, atol=near(1e-5)
    )
    assert view.log_probs is None
    assert view.offsets.tolist() == batch.response_offsets.tolist()
    assert view.sample_of_token.tolist() == np.repeat(np.arange(len(batch)), batch.response_lengths).tolist()


@pytest.mark.parametrize("from_engine", [False, True])
def test_an_estimator_gets_the_sum_of_squared_probabilities_if_it_reads_it(make_learner, qwen3, from_engine):
    batch = make_batch(n_steps=2)
    seen = []

    def estimator(view):
        seen.append(on_host(view))
        return torch.zeros_like(view.loss_mask), torch.zeros_like(view.loss_mask)

    for needs in ({"old_log_probs"}, {"old_log_probs", "sum_pi_squared"}):
        algorithm = Algorithm(estimator, policy_gradient("entropy").loss, frozenset(needs), "raw")
        make_learner(algorithm, use_rollout_logprobs=from_engine, max_tokens_per_gpu=30).train(batch)
    assert seen[0].sum_pi_squared is None
    wanted = []
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        squares = torch.softmax(qwen3[0](tokens[None]).logits[0].double(), dim=-1).square().sum(-1)
        wanted.append(squares[len(tokens) - 1 - int(batch.response_lengths[i]) : -1])
    torch.testing.assert_close(
        seen[1].sum_pi_squared.double(), torch.cat(wanted).detach(), rtol=1e-4, atol=1e-6
    )
    assert torch.equal(seen[0].old_log_probs, seen[1].old_log_probs)


def test_an_estimators_metrics_are_the_steps_and_it_sees_the_groups(make_learner):
    batch = make_batch(lengths=((5, 9),))
    seen = []

    def estimator(view):
        seen.append(view.group_ids.tolist())
        return torch.ones_like(view.loss_mask), torch.ones_like(view.loss_mask), {"tis": torch.tensor(0.5)}

    metrics = make_learner(Algorithm(estimator, policy_gradient().loss, frozenset(), "raw")).train(batch)
    assert metrics["train/tis"] == 0.5
    assert seen == [batch.group_ids.tolist()]


def test_rollout_log_probs_serve_as_the_old_ones_when_asked(make_learner):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording()
    make_learner(algorithm, use_rollout_logprobs=True).train(batch)
    assert views[0].old_log_probs.tolist() == batch.rollout_log_probs.tolist()


def test_missing_rollout_log_probs_are_an_error_when_asked_for(make_learner):
    with pytest.raises(TrainerError, match="use_rollout_logprobs: the batch has no rollout_log_probs"):
        make_learner(use_rollout_logprobs=True).train(make_batch(rollout_log_probs=False))


def test_entropy_is_computed_only_when_needed(make_learner, qwen3):
    batch = make_batch(lengths=((5, 9),))
    for needs in ((), ("entropy",)):
        algorithm, views = recording(*needs)
        make_learner(algorithm).train(batch)
        assert (views[0].entropy is not None) == bool(needs)
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    table = torch.log_softmax(qwen3[0](tokens[None]).logits[0], dim=-1)
    wanted = -(table.exp() * table).sum(-1)[
        4:13
    ]  # 5 prompt tokens: hidden states 4 to 12 predict the response
    torch.testing.assert_close(views[0].entropy, wanted, rtol=0, atol=near(1e-5))


def test_each_token_keeps_its_own_columns(make_learner):
    batch = make_batch()
    algorithm, views = recording()
    make_learner(algorithm, max_tokens_per_gpu=40).train(batch)
    assert len(views) == 3
    rows = {
        (w, m, lp)
        for view in views
        for w, m, lp in zip(
            view.weights.tolist(), view.loss_mask.tolist(), view.rollout_log_probs.tolist(), strict=True
        )
    }
    assert rows == set(
        zip(batch.weights.tolist(), batch.loss_mask.tolist(), batch.rollout_log_probs.tolist(), strict=True)
    )
    for view in views:
        sums = torch.zeros(len(view.rewards)).index_add_(0, view.sample_of_token, view.loss_mask)
        ends = view.offsets.tolist()
        for i, (start, stop) in enumerate(itertools.pairwise(ends)):
            assert sums[i] == view.loss_mask[start:stop].sum()


def broken_at(*calls):
    """Return policy gradient whose loss is NaN at these calls."""
    inner, count = policy_gradient(), iter(range(1000))

    def loss(view, advantages):
        value, metrics = inner.loss(view, advantages)
        return (value * math.nan if next(count) in calls else value), metrics

    return replace(inner, loss=loss)


def test_a_step_with_a_nan_gradient_changes_nothing_and_is_counted(make_learner):
    learner = make_learner(broken_at(0))
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    metrics = learner.train(make_batch())
    assert metrics["train/skipped_steps"] == 1
    assert "train/grad_norm" not in metrics
    assert all(torch.equal(before[name], p) for name, p in learner.model.named_parameters())
    metrics = learner.train(make_batch())
    assert metrics["train/skipped_steps"] == 0
    assert all(p.isfinite().all() for p in learner.model.parameters())
    assert any(not torch.equal(before[name], p) for name, p in learner.model.named_parameters())


def test_too_many_skipped_steps_in_a_row_stop_the_run(make_learner):
    learner = make_learner(broken_at(0, 1, 3, 4, 5), megatron=MegatronSection(max_skipped_steps=2))
    learner.train(make_batch(n_steps=3))  # two in a row, then a good one
    with pytest.raises(TrainerError, match="3 optimizer steps in a row were skipped; max_skipped_steps is 2"):
        learner.train(make_batch(n_steps=3))


def test_a_restart_does_not_forgive_skipped_steps(make_learner, tmp_path):
    section = MegatronSection(max_skipped_steps=2)
    learner = make_learner(broken_at(0, 1), megatron=section)
    learner.train(make_batch(n_steps=2))
    learner.save(tmp_path)
    learner = make_learner(broken_at(0), megatron=section)
    learner.load(tmp_path)
    with pytest.raises(TrainerError, match="3 optimizer steps in a row were skipped; max_skipped_steps is 2"):
        learner.train(make_batch())


def test_gradients_are_clipped_to_their_norm(make_learner, qwen3):
    free = make_learner()
    norm = free.train(make_batch())["train/grad_norm"]
    gradients = gradients_of(free, qwen3[1])
    clipped = make_learner(clip_grad=norm / 4)
    assert clipped.train(make_batch())["train/grad_norm"] == pytest.approx(norm)
    quarter = {name: gradient / 4 for name, gradient in gradients.items()}
    assert relative(gradients_of(clipped, qwen3[1]), quarter) <= 1e-5


def test_a_sample_beyond_the_context_is_named(make_learner):
    with pytest.raises(TrainerError, match="sample 101: has 260 tokens; the model's limit is 256"):
        make_learner().train(make_batch(lengths=((5, 5), (250, 10))))


def test_a_learner_that_cannot_be_built_leaves_nothing_behind(make_learner, make_hf, tmp_path):
    _, folder = make_hf("qwen3", head_dim=32, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(CheckpointError, match=r"11 .*missing|missing.*wanted"):
        make_learner(folder=folder)
    assert make_learner().train(make_batch())["train/skipped_steps"] == 0


def test_first_adamw_step_is_that_of_torch(make_learner):
    learner = make_learner(lr=1e-2, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.train(make_batch())
    for name, parameter in learner.model.named_parameters():
        # Bias correction makes both moments those of g: p <- p (1 - lr wd) - lr g / (|g| + eps); no decay of vectors.
        g, decay = parameter.main_grad, 0.1 if parameter.dim() > 1 else 0.0
        wanted = before[name] * (1 - 1e-2 * decay) - 1e-2 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)
