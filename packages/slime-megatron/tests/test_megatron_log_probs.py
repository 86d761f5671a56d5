"""Chunked log-probs and entropies against torch's log_softmax in float64, with gradients."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[(7, 50), (70, 1 << 16)], ids=["one chunk", "three chunks"])
def inputs(request):
    generator = torch.Generator().manual_seed(3)
    rows, vocab = request.param
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return (
        logits,
        torch.randint(0, vocab, (rows,), generator=generator),
        torch.randn(2, rows, generator=generator),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(inputs, temperature):
    from slime_megatron.log_probs import token_log_probs

    logits, targets, (d_log_probs, d_entropy) = inputs
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    log_probs, entropy = token_log_probs(ours, targets, temperature=temperature, with_entropy=True)
    table = torch.log_softmax(theirs / temperature, dim=-1)
    wanted = table.gather(1, targets[:, None]).squeeze(1)
    wanted_entropy = -(table.exp() * table).sum(dim=-1)
    torch.testing.assert_close(log_probs.double(), wanted, rtol=1e-6, atol=3e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-6, atol=3e-5)
    (log_probs @ d_log_probs + entropy @ d_entropy).backward()
    (wanted @ d_log_probs.double() + wanted_entropy @ d_entropy.double()).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=5e-6)


def test_without_entropy_none_is_computed_and_the_gradient_is_right(inputs):
    from slime_megatron.log_probs import token_log_probs

    logits, targets, (weights, _) = inputs
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    log_probs, entropy = token_log_probs(ours, targets)
    assert entropy is None
    (log_probs @ weights).backward()
    (torch.log_softmax(theirs, dim=-1).gather(1, targets[:, None]).squeeze(1) @ weights.double()).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_squared_probabilities_add_up_to_those_of_softmax(inputs, temperature):
    from slime_megatron.log_probs import Vocabulary, sum_pi_squared

    logits = inputs[0]
    found = sum_pi_squared(logits, vocabulary=Vocabulary(logits.shape[1]), temperature=temperature)
    wanted = torch.softmax(logits.double() / temperature, dim=-1).square().sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_bfloat16_logits_are_taken_as_they_are():
    from slime_megatron.log_probs import token_log_probs

    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = token_log_probs(logits, torch.tensor([2]))
    # ln(e^3 / (e + e^2 + e^3)) = -ln(1 + e^-1 + e^-2)
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == pytest.approx(-0.40760596, abs=1e-6)
    log_probs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_a_second_backward_pass_is_refused():
    from slime_megatron.log_probs import token_log_probs

    weight = torch.randn(3, 4, requires_grad=True)
    log_probs, _ = token_log_probs(torch.randn(5, 3) @ weight, torch.tensor([0, 1, 2, 3, 0]))
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_columns_on_four_ranks_give_the_log_softmax_of_all_that_are_tokens(ranks):
    """5 ids in 8 columns: the third rank has one id and padding, the fourth padding alone."""
    generator = torch.Generator().manual_seed(3)
    logits, gradients = torch.randn(6, 8, generator=generator) * 3, torch.randn(2, 6, generator=generator)
    targets = torch.tensor([0, 1, 2, 3, 4, 2])
    found = ranks.run(
        "log_probs_of_columns", 4, logits=logits, targets=targets, vocab_size=5, gradients=gradients
    )
    theirs = logits.double().requires_grad_()
    table = torch.log_softmax(theirs[:, :5] / 0.7, dim=-1)
    wanted = table.gather(1, targets[:, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(dim=-1)
    (wanted @ gradients[0].double() + entropy @ gradients[1].double()).backward()
    for log_probs, entropies, squares, _ in found:
        torch.testing.assert_close(log_probs.double(), wanted.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies.double(), entropy.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(squares.double(), table.detach().exp().square().sum(-1), rtol=0, atol=1e-6)
    gradient = torch.cat([own for *_, own in found], dim=1)
    torch.testing.assert_close(gradient.double(), theirs.grad, rtol=0, atol=1e-5)
