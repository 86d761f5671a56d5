"""The gated delta rule in chunks against one token after another, and against transformers."""

from __future__ import annotations

import pytest
import torch
from slime_models.delta_rule import CHUNK, causal_convolution, gated_delta_rule
from torch.nn import functional as F

#: Two key heads of 6, of which each has 3 value heads of 5.
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 6, 6, 5


def drawn(tokens, *, batch=2, seed=0, dtype=torch.float64):
    """Return query, key, value, and the decay and beta of tokens, as keyword arguments."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=dtype)

    return {
        "query": normal(KEY_HEADS, KEY),
        "key": normal(KEY_HEADS, KEY),
        "value": normal(VALUE_HEADS, VALUE),
        "log_decay": -F.softplus(normal(VALUE_HEADS)),
        "beta": normal(VALUE_HEADS).sigmoid(),
    }


def step_by_step(query, key, value, log_decay, beta, state=None):
    """Return outputs and state by the definition: one sequence, one head, one token after another."""
    batch, tokens = value.shape[:2]
    states = torch.zeros(batch, VALUE_HEADS, KEY, VALUE, dtype=value.dtype) if state is None else state
    rows, last = [], []
    for b in range(batch):
        for h in range(VALUE_HEADS):
            memory = states[b, h]
            for t in range(tokens):
                q, k = (x[b, t, h // 3] for x in (query, key))
                q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
                memory = memory * log_decay[b, t, h].exp()
                memory = memory + torch.outer(k, beta[b, t, h] * (value[b, t, h] - k @ memory))
                rows.append(q @ memory / KEY**0.5)
            last.append(memory)
    out = torch.stack(rows).view(batch, VALUE_HEADS, tokens, VALUE).transpose(1, 2)
    return out, torch.stack(last).view(batch, VALUE_HEADS, KEY, VALUE)


def gradients(rule, given, state):
    """Return what the rule gives, and the gradients of a fixed weighted sum of it."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    start = None if state is None else state.clone().requires_grad_()
    out, last = rule(**leaves, state=start)
    sum(x.flatten() @ torch.linspace(-1, 1, x.numel(), dtype=x.dtype) for x in (out, last)).backward()
    found = [x.grad for x in leaves.values()] + ([] if start is None else [start.grad])
    return out, last, *found


@pytest.mark.parametrize("tokens", [1, 3, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("begun", [False, True], ids=["from zeros", "from a state"])
def test_chunks_give_values_and_gradients_of_one_token_after_another(tokens, begun):
    given = drawn(tokens, batch=1)
    state = torch.randn(1, VALUE_HEADS, KEY, VALUE, dtype=torch.float64) if begun else None
    single = {name: x.float() for name, x in given.items()}
    found = gradients(gated_delta_rule, single, None if state is None else state.float())
    for one, wanted in zip(found, gradients(step_by_step, given, state), strict=True):
        assert (one - wanted).detach().abs().max() <= 1e-5 * wanted.detach().abs().max().clamp(min=1)


def test_a_state_carries_a_sequence_on():
    whole = drawn(100)
    first, second = ({name: x[:, part] for name, x in whole.items()} for part in (slice(37), slice(37, None)))
    out, last = gated_delta_rule(**whole)
    before, state = gated_delta_rule(**first)
    after, end = gated_delta_rule(**second, state=state)
    assert torch.allclose(torch.cat((before, after), dim=1), out, atol=1e-6)
    assert torch.allclose(end, last, atol=1e-6)


def test_a_token_without_decay_and_beta_leaves_the_state():
    given = drawn(CHUNK + 9)
    _, wanted = gated_delta_rule(**{name: x[:, :20] for name, x in given.items()})
    for name in ("log_decay", "beta"):
        given[name][:, 20:] = 0
    _, found = gated_delta_rule(**given)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_transformers_computes_the_same():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given = drawn(150, dtype=torch.float32)
    state = torch.randn(2, VALUE_HEADS, KEY, VALUE)
    theirs = {name: given[name].repeat_interleave(3, dim=2) for name in ("query", "key")}
    wanted, last = torch_chunk_gated_delta_rule(
        **theirs,
        value=given["value"],
        g=given["log_decay"],
        beta=given["beta"],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out, end = gated_delta_rule(**given, state=state)
    assert (out - wanted).abs().max() <= 1e-6
    assert (end - last).abs().max() <= 2e-6


def test_a_convolution_sees_only_what_came_before():
    """Width 3, weights 1, 10 and 100 from the oldest input to the newest."""
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    weight = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3)
    before = torch.tensor([5.0, 7.0]).view(1, 2, 1)
    alone, after = causal_convolution(x, weight), causal_convolution(x, weight, before)
    assert torch.equal(alone.flatten(), F.silu(torch.tensor([100.0, 210.0, 321.0])))
    assert torch.equal(after.flatten(), F.silu(torch.tensor([175.0, 217.0, 321.0])))
