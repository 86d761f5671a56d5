"""Losses that read logits: those of transformers, with the gradients that log-probs give, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slime_megatron.settings.checks import logits_problems
from slime_megatron.settings.section import MegatronSection

from ..algorithms import policy_gradient_by
from ..batches import make_batch
from ..comparison import conversations, gradients_of, near, relative, shared_prompts
from ..layouts import LAYOUTS, largest_difference
from ..views import recording


@pytest.mark.parametrize("share", [True, False])
def test_a_loss_reads_the_logits_of_transformers(make_learner, qwen3, share):
    reference, _ = qwen3
    batch = replace(shared_prompts(), temperature=0.5)
    algorithm, views = recording("logits", "sequence_logits", "total_lengths")
    learner = make_learner(algorithm, megatron=MegatronSection(share_prefix=share), max_tokens_per_gpu=60)
    learner.train(batch)
    seen = 0
    for view in views:
        sequences = list(view.sequence_tokens.split(view.total_lengths.tolist()))
        logits = view.sequence_logits.detach().split(view.total_lengths.tolist())
        assert view.sequence_logits.dtype == torch.float32 and view.sequence_logits.requires_grad
        responses = []
        for ids, found, n in zip(sequences, logits, view.offsets.diff().tolist(), strict=True):
            wanted = reference(ids[None]).logits[0].detach()
            torch.testing.assert_close(found[:-1], wanted[:-1], rtol=1e-4, atol=1e-4)
            assert not found[-1].any()  # nothing is predicted behind a sample's last token
            responses.append(wanted[-n - 1 : -1] / 0.5)
            seen += 1
        torch.testing.assert_close(view.logits.detach(), torch.cat(responses), rtol=1e-4, atol=2e-4)
        own = view.logits.log_softmax(-1).gather(1, view.tokens[:, None]).squeeze(1)
        torch.testing.assert_close(own, view.log_probs, rtol=1e-5, atol=1e-5)
    assert seen == len(batch)


@pytest.mark.parametrize("read", ["logits", "sequence_logits"])
def test_gradients_are_those_of_log_probs(make_learner, qwen3, read):
    found = {}
    for name in ("log_probs", read):
        learner = make_learner(policy_gradient_by(name), max_tokens_per_gpu=120)
        learner.train(conversations())
        found[name] = gradients_of(learner, qwen3[1])
    assert relative(found[read], found["log_probs"]) <= near(1e-6)


@pytest.mark.parametrize(
    ("layout", "read"), [("TP2", "logits"), ("TP2+SP", "sequence_logits"), ("PP2", "sequence_logits")]
)
def test_ranks_gather_them_with_the_same_gradients(ranks, cut_models, layout, read):
    common = {"folder": cut_models["qwen3"], "batch": make_batch()}
    n, megatron = LAYOUTS[layout]
    wanted = ranks.run("gradients_by", n, megatron=megatron, read="log_probs", **common)[0]
    found = ranks.run("gradients_by", n, megatron=megatron, read=read, **common)[0]
    assert largest_difference(found, wanted, relative=True) <= 1e-6


def test_ranks_that_each_have_some_of_a_samples_tokens_are_refused():
    section = MegatronSection(context_parallel_size=2)
    assert not list(logits_problems(section, {"entropy"}))
    (problem,) = logits_problems(section, {"logits"})
    assert "context_parallel_size: found 2 with a loss that reads logits; wanted 1" in str(problem)
