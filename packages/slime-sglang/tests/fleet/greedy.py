"""Greedy requests to real servers, and checks that every token is that of the weights which it says."""

from __future__ import annotations

import pytest
from slime_core.protocols import SamplingParams

PROMPTS = [[5, 6, number] for number in range(8)]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
LONG = SamplingParams(max_new_tokens=200, min_new_tokens=200, temperature=0)


def group_of(replica):
    return replica.engine._server._process.pid


async def assert_generates(engine, model, log_probs_of, prompts=PROMPTS[:3]):
    """Check that short answers of an engine are a model's likeliest tokens, with its log-probs."""
    for prompt in prompts:
        answer = await engine.generate(prompt, GREEDY)
        log_probs, likeliest = log_probs_of(model, prompt, answer.tokens)
        assert answer.tokens == likeliest
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)


def assert_greedy(prompt, answer, models, log_probs_of):
    """Check that each token of a long answer is the likeliest of the model of its version, with its log-prob.

    The models are in float64: over 200 tokens transformers in float32 is off too.
    """
    for span in answer.metadata["weight_versions"]:
        place = slice(span["start"], span["end"])
        log_probs, likeliest = log_probs_of(models[span["version"]], prompt, answer.tokens, can_end=False)
        assert answer.tokens[place] == likeliest[place]
        assert answer.log_probs[place] == pytest.approx(log_probs[place], abs=1e-5, rel=0)
    assert span["end"] == len(answer.tokens) == len(answer.log_probs) == LONG.max_new_tokens
