"""The bias of routers: moved by hand-worked loads under several layouts, kept exactly, float32 on every way; else frozen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_megatron import hooks
from slime_megatron.settings import parallel_checks
from slime_megatron.settings.section import MegatronSection
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint

from ..batches import make_batch
from ..comparison import sent
from ..layouts import CONTEXT, EXPERT, PIPELINE, SEQUENCE, TENSOR
from ..views import recording

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FLAGS = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": "0.25"}
MOVES = {"megatron_args": FLAGS}
REPLAYED = MOVES | {"use_rollout_routing_replay": True}


def routed_batch():
    """Return two samples of one prompt, with routes, twice: two optimizer steps.

    The prompt's two tokens go to experts 0, 1 and 0, 2, what is forwarded of the first response to 0, 3, and of the second
    to 1, 3. The prompt counts for both samples, so the loads are 5, 3, 2, 2, and their mean is 3. The dense layer's routes
    are what an engine left there.
    """
    batch = make_batch(lengths=((2, 2), (2, 2)) * 2, n_steps=2)
    tokens = batch.tokens.reshape(4, 4).copy()
    tokens[1, :2], tokens[3, :2] = tokens[0, :2], tokens[2, :2]
    routes = []
    for last in ([0, 3], [1, 3]) * 2:
        experts = np.full((3, 2, 2), 99)
        experts[:, 1] = [[0, 1], [0, 2], last]
        routes.append(experts)
    return replace(batch, tokens=tokens.reshape(-1), extra={"rollout_routed_experts": routes})


@pytest.mark.parametrize(
    ("n", "cut", "max_tokens"),
    [
        (1, {}, 100),
        (1, {"share_prefix": False, "recompute_granularity": "full"}, 4),  # a micro-batch for each sample
        (2, EXPERT, 100),  # each rank has a sample
        (2, CONTEXT, 100),  # with padding
        (4, TENSOR | SEQUENCE | PIPELINE, 100),  # with padding; the first stage has no router
    ],
)
def test_bias_moves_against_the_loads_of_each_optimizer_step(ranks, cut_models, n, cut, max_tokens):
    folder = cut_models["glm4_moe"]
    common = {"folder": folder, "batch": routed_batch(), "train": {"max_tokens_per_gpu": max_tokens}}
    _, _, weights = ranks.run("train", n, megatron=cut | REPLAYED, **common)[0]
    before = HfCheckpoint(folder)[BIAS]
    assert weights[BIAS].equal(
        before + 0.25 * torch.tensor([-1.0, 0, 1, 1]) + 0.25 * torch.tensor([-1.0, 0, 1, 1])
    )


def test_bias_stays_without_the_flag_and_in_a_step_that_is_skipped(ranks, cut_models):
    folder = cut_models["glm4_moe"]
    common = {"folder": folder, "batch": make_batch()}
    _, _, weights = ranks.run("train", 1, megatron={}, train={}, **common)[0]
    assert weights[BIAS].equal(HfCheckpoint(folder)[BIAS])
    for metrics, untouched, _ in ranks.run("bad_gradients", 2, megatron=PIPELINE | MOVES, **common):
        assert metrics["train/skipped_steps"] == 1
        assert untouched


def test_moved_bias_goes_on_from_a_checkpoint_under_another_layout(ranks, cut_models, tmp_path):
    common = {"folder": cut_models["glm4_moe"], "checkpoint": tmp_path, "moments": False}
    common["batches"] = [make_batch(seed=seed) for seed in range(3)]
    saved = ranks.run("save_and_go_on", 2, megatron=PIPELINE | MOVES, **common)[0]
    loaded = ranks.run("resume", 1, megatron=MOVES, **common)[0]
    assert not saved["weights"][BIAS].equal(HfCheckpoint(cut_models["glm4_moe"])[BIAS])
    assert loaded["weights"][BIAS].equal(saved["weights"][BIAS])
    assert loaded["metrics"][0]["train/loss"] == pytest.approx(saved["metrics"][0]["train/loss"], abs=1e-6)


def test_losses_of_routers_are_means_over_the_layers_that_have_one(ranks, cut_models):
    """One of two layers, and a pipeline stage without any: its rank must not wait for the other."""
    flags = {"megatron_args": {"moe_z_loss_coeff": "1e-3", "moe_aux_loss_coeff": "1e-3"}}
    common = {"folder": cut_models["glm4_moe"], "batch": make_batch(), "train": {}}
    one = ranks.run("train", 1, megatron=flags, **common)[0][0]
    two = ranks.run("train", 2, megatron=PIPELINE | flags, **common)[1][0]
    for name in ("train/z_loss", "train/load_balancing_loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)
    assert one["train/load_balancing_loss"] >= 0.9  # 1 where experts get what they are asked for evenly


def test_reference_keeps_the_bias_that_it_began_with(make_learner, cut_models):
    """The learning rate is 0: the policy differs from the reference by its bias alone."""
    algorithm, views = recording("ref_log_probs", "old_log_probs")
    megatron = MegatronSection(megatron_args=FLAGS | {"moe_router_bias_update_rate": "0.5"})
    learner = make_learner(algorithm, folder=cut_models["glm4_moe"], megatron=megatron, lr=0.0)
    for _ in range(2):
        learner.train(make_batch())
    first, second = views
    assert first.ref_log_probs.equal(second.ref_log_probs)
    assert (second.old_log_probs - second.ref_log_probs).abs().max() > 0.01


def test_bias_is_sent_and_written_in_float32(make_learner, cut_models, tmp_path):
    folder = cut_models["glm4_moe"]
    learner = make_learner(folder=folder, bf16=True)
    weights = sent(learner, "bfloat16")
    assert {name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16} == {BIAS}
    assert weights[BIAS].equal(HfCheckpoint(folder)[BIAS])
    learner.save_hf(tmp_path / "hf")
    assert HfCheckpoint(tmp_path / "hf")[BIAS].equal(HfCheckpoint(folder)[BIAS])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--moe-router-bias-update-rate", "0.001"],
            "moe_router_bias_update_rate: found it without moe_router_enable_expert_bias",
        ),
        (["--moe-router-enable-expert-bias", "--lora-rank", "4"], "found it beside lora.rank"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags, message):
    needed = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
    problems = hooks.slime_check_config(load_settings([], [*needed, *flags], registry=Registry()), Registry())
    assert len([problem for problem in problems if message in str(problem)]) == 1


def test_flag_needs_a_model_that_has_the_bias(cut_models):
    section = MegatronSection(megatron_args={"moe_router_enable_expert_bias": True})

    def found(family, name):
        return [
            str(p)
            for p in parallel_checks.model_problems(
                section, family.architecture(read_config(cut_models[name])), family
            )
        ]

    assert found(GLM4_MOE, "glm4_moe") == []
    (message,) = found(QWEN3_MOE, "qwen3_moe")
    assert "moe_router_enable_expert_bias: found it with a qwen3_moe model" in message
