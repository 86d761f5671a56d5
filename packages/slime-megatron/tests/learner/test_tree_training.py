"""Training on prefix trees: tokens that samples of a conversation share are forwarded once; the gradient is that of each sample by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_megatron.settings.section import MegatronSection

from ..comparison import conversations, near
from ..views import recording

#: Tokens that the batch's samples have but the last of each, and those of its trees: 69 + 5 + 14 + 14, 14 + 3, 7.
LINEAR, SHARED = 31 + 69 + 54 + 63 + 34 + 14 + 9 + 7, 102 + 17 + 7


@pytest.fixture(scope="module")
def folders(cut_models, make_hf):
    """Folders of tiny models by kind."""
    llama = make_hf("llama", num_hidden_layers=2, tie_word_embeddings=False)[1]
    return cut_models | {"llama": llama}


def both_ways(make_learner, folder, batch, *, megatron=None, max_tokens=1000, **given):
    """Return (metrics, gradients, log-probs [T]) of a step with every sample by itself, and of one with shared tokens."""
    found = []
    for share in (False, True):
        algorithm, views = recording()
        learner = make_learner(
            algorithm,
            folder=folder,
            megatron=MegatronSection(share_prefix=share, **megatron or {}),
            max_tokens_per_gpu=max_tokens,
            **given,
        )
        metrics = learner.train(batch)
        order = torch.cat([view.rollout_log_probs for view in views]).argsort()  # each token has another
        log_probs = torch.cat([view.log_probs.detach() for view in views])[order]
        trained = {name: each for name, each in learner.model.named_parameters() if each.requires_grad}
        gradients = {name: each.main_grad.clone() for name, each in trained.items()}
        found.append((metrics, gradients, log_probs))
    return found


def check_equal(linear, shared, *, bound=2e-6):
    """The gradient as a whole within 1e-6, and each tensor's within the bound, by the norm of the difference; log-probs and metrics.

    On a CPU without AMX small tensors differ by up to 1.5e-6. Those of samples by themselves differ by 1.2e-6 where they are only cut into
    other micro-batches. On CUDA see `near`.
    """
    apart, sizes = [], []
    for name, wanted in linear[1].items():
        apart.append((shared[1][name] - wanted).norm())
        sizes.append(wanted.norm())
        assert apart[-1] <= near(bound) * sizes[-1], name
    assert torch.stack(apart).norm() <= near(1e-6) * torch.stack(sizes).norm()
    assert (shared[2] - linear[2]).abs().max() <= near(1e-5)
    for name, value in linear[0].items():
        if name.startswith("train/"):
            assert shared[0][name] == pytest.approx(value, rel=near(2e-6), abs=near(1e-6)), name


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3_moe"),
        *("gemma3_text", "gpt_oss"),  # windows; and sinks
        *("deepseek_v3", "deepseek_v32"),  # latent attention; to chosen tokens
        "qwen3_next",  # delta nets
    ],
)
def test_gradients_and_log_probs_are_those_of_each_sample_by_itself(make_learner, folders, kind):
    """Each sample has its own reward and mask, so that a token of several is trained by the sum of what they say."""
    linear, shared = both_ways(make_learner, folders[kind], conversations())
    # A delta net's small tensors differ by 2e-6 already where samples by themselves are cut into other micro-batches.
    check_equal(linear, shared, bound=4e-6 if kind == "qwen3_next" else 2e-6)
    assert (linear[0]["perf/forwarded_tokens"], shared[0]["perf/forwarded_tokens"]) == (LINEAR, SHARED)


@pytest.mark.parametrize("max_tokens", [80, 40])
def test_trees_may_be_cut_into_micro_batches(make_learner, folders, max_tokens):
    check_equal(*both_ways(make_learner, folders["qwen3_moe"], conversations(), max_tokens=max_tokens))


def test_router_losses_count_a_token_for_each_sample(make_learner, folders):
    flags = {
        "moe_z_loss_coeff": "1e-2",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": "1e-2",
    }
    check_equal(
        *both_ways(make_learner, folders["qwen3_moe"], conversations(), megatron={"megatron_args": flags})
    )


def test_mtp_layers_see_the_tokens_that_follow_in_each_sample(make_learner, mtp_model):
    check_equal(
        *both_ways(make_learner, mtp_model[1], conversations(), megatron={"enable_mtp_training": True})
    )


def test_a_token_that_one_sample_drew_from_other_ids_has_its_own_log_prob(make_learner, folders):
    """Two samples of the same ids; the second was drawn from ten ids each, the target among them."""
    batch = conversations()
    draw = np.random.default_rng(1)
    given = []
    for i in range(len(batch)):
        n = int(batch.response_lengths[i])
        targets = batch.tokens[batch.offsets[i + 1] - n : batch.offsets[i + 1]]
        others = draw.permuted(np.tile(np.arange(250), (n, 1)), axis=1)[:, : 5 + 5 * (i == 1)]
        ids = np.concatenate([targets[:, None], others], axis=1)
        given.append((ids.flatten(), np.arange(n + 1) * ids.shape[1]))
    batch = replace(batch, extra={"rollout_top_p_tokens": given})
    linear, shared = both_ways(make_learner, folders["llama"], batch, settings={"restricted": True})
    check_equal(linear, shared)


def test_routes_are_replayed_where_samples_share_them(make_learner, folders):
    batch, draw = conversations(), np.random.default_rng(0)
    routes = [draw.random((int(n) - 1, 2, 4)).argsort(-1)[..., :2].astype(np.int32) for n in batch.lengths]
    routes[0] = routes[1][:31]
    routes[2][:25], routes[4][:20] = (
        routes[1][:25],
        routes[1][:20],
    )  # the fork after 40 is routed alike for 25
    batch = replace(batch, extra={"rollout_routed_experts": routes})
    megatron = {"use_rollout_routing_replay": True}
    linear, shared = both_ways(make_learner, folders["qwen3_moe"], batch, megatron=megatron)
    check_equal(linear, shared)
    # Sample 3 shares nothing; the fork has 54 tokens of its own but 20, as parting at 25 would save too little.
    assert shared[0]["perf/forwarded_tokens"] == 69 + 63 + 34 + 14 + (14 + 9) + 7
