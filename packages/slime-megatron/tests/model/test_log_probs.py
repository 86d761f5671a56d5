"""Chunked log-probs and entropies against torch's log_softmax in float64, with gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from slime_core.errors import TrainerError

from ..batches import make_batch


@pytest.fixture(params=[(7, 50), (70, 1 << 16)], ids=["one chunk in float32", "three chunks in float32"])
def inputs(request):
    """Return hidden states [R, 12], a weight [V, 12], targets [R], and gradients of log-probs and entropies [2, R]."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab = request.param
    return (
        torch.randn(rows, 12, generator=generator),
        torch.randn(vocab, 12, generator=generator),
        torch.randint(0, vocab, (rows,), generator=generator),
        torch.randn(2, rows, generator=generator),
    )


def reference(hidden, weight, targets, gradients, *, temperature=1.0, kept=None):
    """Return log-probs, entropies, and the gradients of hidden states and weight, by log_softmax in float64.

    Args:
        hidden, weight, targets, gradients, temperature: see `inputs`.
        kept: of each row the ids that it may be, or none for all.
    """
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.t() / temperature
    if kept is not None:
        others = torch.tensor([[bool(ids) and i not in ids for i in range(len(weight))] for ids in kept])
        logits = logits.masked_fill(others, -1e9)
    table = torch.log_softmax(logits, dim=-1)
    log_probs = table.gather(1, targets[:, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(dim=-1)
    (log_probs @ gradients[0].double() + entropy @ gradients[1].double()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_near(found, wanted):
    """Assert that float32 numbers are those of float64, but for rounding relative to the largest."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("chunk_tokens", [4096, 3], ids=["whole", "chunks of 3 tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(inputs, temperature, chunk_tokens):
    from slime_megatron.model.log_probs import token_log_probs

    hidden, weight, targets, gradients = inputs
    wanted = reference(hidden, weight, targets, gradients, temperature=temperature)
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    found = token_log_probs(
        *ours, targets, temperature=temperature, with_entropy=True, chunk_tokens=chunk_tokens
    )
    (found[0] @ gradients[0] + found[1] @ gradients[1]).backward()
    for one, other in zip((*found, *(t.grad for t in ours)), wanted, strict=True):
        assert_near(one, other)


def test_chunks_of_tokens_change_nothing_beyond_rounding():
    from slime_megatron.model.log_probs import token_log_probs

    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(70, 12, generator=generator), torch.randn(500, 12, generator=generator)
    targets, gradient = torch.arange(70), torch.randn(70, generator=generator)
    found = []
    for chunk_tokens in (4096, 5):
        ours = [t.clone().requires_grad_() for t in (hidden, weight)]
        log_probs, entropy = token_log_probs(*ours, targets, chunk_tokens=chunk_tokens)
        assert entropy is None
        (log_probs @ gradient).backward()
        found.append((log_probs.detach(), *(t.grad for t in ours)))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6 * whole.abs().max().item())


def test_no_token_has_a_gradient_of_zero_of_the_weight():
    """And not none: where ranks add gradients up during the backward pass, Megatron's hooks refuse a rank without one."""
    from slime_megatron.model.log_probs import token_log_probs

    weight, hidden = torch.ones(50, 12, requires_grad=True), torch.empty(0, 12, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, weight, torch.empty(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.equal(torch.zeros(50, 12))
    assert hidden.grad is not None


@pytest.mark.parametrize("chunk_tokens", [4096, 3], ids=["whole", "chunks of 3 tokens"])
def test_squared_probabilities_add_up_to_those_of_softmax(inputs, chunk_tokens):
    from slime_megatron.model.log_probs import sum_pi_squared

    hidden, weight, *_ = inputs
    found = sum_pi_squared(hidden, weight, temperature=0.7, chunk_tokens=chunk_tokens)
    wanted = torch.softmax(hidden.double() @ weight.double().t() / 0.7, dim=-1).square().sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("chunk_tokens", [4096, 3], ids=["whole", "chunks of 3 tokens"])
def test_other_ids_than_those_drawn_from_count_for_nothing(chunk_tokens):
    from slime_megatron.model.log_probs import sum_pi_squared, token_log_probs

    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 12, generator=generator), torch.randn(50, 12, generator=generator)
    targets, gradients = torch.tensor([3, 0, 49, 7, 7, 21, 2]), torch.randn(2, 7, generator=generator)
    kept = [[3, 4, 5], [0], [], [1, 7, 40], [7, 8], [20, 21, 22, 49], []]
    wanted = reference(hidden, weight, targets, gradients, temperature=0.7, kept=kept)
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    options = {"temperature": 0.7, "sampling_mask": sampling_mask(kept), "chunk_tokens": chunk_tokens}
    found = token_log_probs(*ours, targets, with_entropy=True, **options)
    (found[0] @ gradients[0] + found[1] @ gradients[1]).backward()
    for one, other in zip((*found, *(t.grad for t in ours)), wanted, strict=True):
        assert_near(one, other)
    assert found[0][1] == 0  # the only one that it could be
    squares = sum_pi_squared(hidden, weight, **options)
    assert squares[1] == 1
    probabilities = torch.softmax((hidden.double() @ weight.double().t() / 0.7)[0, 3:6], dim=-1)
    assert squares[0].item() == pytest.approx(probabilities.square().sum().item(), abs=1e-6)


def sampling_mask(kept):
    from slime_megatron.batch.sampling_mask import SamplingMask

    offsets = np.cumsum([0, *(len(ids) for ids in kept)])
    return SamplingMask(torch.tensor([i for ids in kept for i in ids]), offsets)


def test_the_mask_of_some_tokens_is_selected():
    some = sampling_mask([[3, 4, 5], [0], [], [1, 7]]).select(np.array([3, 2, 0]), torch.device("cpu"))
    assert some.ids.tolist() == [1, 7, 3, 4, 5]
    assert some.offsets.tolist() == [0, 2, 2, 5]


def test_a_batch_that_does_not_say_what_its_tokens_were_drawn_from_is_refused_by_sample():
    from slime_megatron.batch.sampling_mask import sampling_mask_of

    batch = make_batch(lengths=((3, 2), (2, 2)))
    batch.loss_mask[:] = [1, 1, 1, 0]
    first, *_, third, _ = batch.tokens[[3, 4, 7, 8]].tolist()

    def found(*held):
        return sampling_mask_of(dataclasses.replace(batch, extra={"rollout_top_p_tokens": held}))

    good = found(([first, 99], [0, 2, 2]), ([98, third], [0, 2, 2]))
    assert good.ids.tolist() == [first, 99, 98, third]
    assert good.offsets.tolist() == [0, 2, 2, 4, 4]
    with pytest.raises(TrainerError, match="sample 101: rollout_top_p_token_ids is missing"):
        found(([first], [0, 1, 1]), None)
    with pytest.raises(
        TrainerError, match=rf"sample 101: response token 0 \(id {third}\) is not among the 2 ids"
    ):
        found(([first], [0, 1, 1]), ([98, 99], [0, 2, 2]))


def test_without_entropy_the_gradient_is_right(inputs):
    from slime_megatron.model.log_probs import token_log_probs

    hidden, weight, targets, gradients = inputs
    gradients = gradients * torch.tensor([[1.0], [0.0]])
    wanted = reference(hidden, weight, targets, gradients)
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    log_probs, _ = token_log_probs(*ours, targets)
    (log_probs @ gradients[0]).backward()
    for one, other in zip((log_probs, *(t.grad for t in ours)), (wanted[0], *wanted[2:]), strict=True):
        assert_near(one, other)


def test_a_frozen_weight_gets_no_gradient_and_hidden_states_the_same(inputs):
    from slime_megatron.model.log_probs import token_log_probs

    hidden, weight, targets, (gradient, _) = inputs
    found = []
    for trained in (True, False):
        ours = hidden.clone().requires_grad_()
        own_weight = weight.clone().requires_grad_(trained)
        log_probs, _ = token_log_probs(ours, own_weight, targets)
        (log_probs @ gradient).backward()
        found.append(ours.grad)
    assert own_weight.grad is None
    assert torch.equal(*found)


def test_logits_of_all_tokens_are_never_held():
    """1000 tokens x 5000 ids: no memory that is taken holds more than 10 tokens' logits."""
    from slime_megatron.model.log_probs import token_log_probs
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            largest.extend(t.untyped_storage().nbytes() for t in [result] if isinstance(t, torch.Tensor))
            return result

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1000, 2, generator=generator).requires_grad_()
    weight = torch.randn(5000, 2, generator=generator).requires_grad_()
    with Sizes():
        log_probs, _ = token_log_probs(hidden, weight, torch.zeros(1000, dtype=torch.int64), chunk_tokens=10)
        log_probs.sum().backward()
    assert max(largest) == 10 * 5000 * 4


def test_bfloat16_states_are_taken_as_they_are():
    from slime_megatron.model.log_probs import token_log_probs

    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, weight, torch.tensor([2]))
    # ln(e^3 / (e + e^2 + e^3)) = -ln(1 + e^-1 + e^-2)
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == pytest.approx(-0.40760596, abs=1e-6)
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_a_second_backward_pass_is_refused():
    from slime_megatron.model.log_probs import token_log_probs

    weight = torch.randn(4, 3, requires_grad=True)
    log_probs, _ = token_log_probs(torch.randn(5, 3), weight, torch.tensor([0, 1, 2, 3, 0]))
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize("kept", [None, [[0, 2], [], [2, 4], [3], [0, 4], [0, 1, 2]]], ids=["any", "held"])
@pytest.mark.parametrize("chunk_tokens", [4096, 4], ids=["whole", "chunks of 4 tokens"])
def test_columns_on_four_ranks_give_the_log_softmax_of_all_that_are_tokens(ranks, chunk_tokens, kept):
    """5 ids in 8 columns: the third rank has one id and padding, the fourth padding alone."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(6, 7, generator=generator), torch.randn(8, 7, generator=generator)
    gradients = torch.randn(2, 6, generator=generator)
    targets = torch.tensor([0, 1, 2, 3, 4, 2])
    found = ranks.run(
        "log_probs_of_columns",
        4,
        hidden=hidden,
        weight=weight,
        targets=targets,
        vocab_size=5,
        gradients=gradients,
        chunk_tokens=chunk_tokens,
        sampling_mask=kept and sampling_mask(kept),
    )
    wanted = reference(hidden, weight[:5], targets, gradients, temperature=0.7, kept=kept)
    logits = hidden.double() @ weight[:5].double().t() / 0.7
    if kept:
        others = torch.tensor([[bool(ids) and i not in ids for i in range(5)] for ids in kept])
        logits = logits.masked_fill(others, -1e9)
    squares = torch.softmax(logits, dim=-1).square().sum(-1)
    for log_probs, entropies, sums, _, _ in found:
        torch.testing.assert_close(log_probs.double(), wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies.double(), wanted[1], rtol=0, atol=1e-5)
        torch.testing.assert_close(sums.double(), squares, rtol=0, atol=1e-6)
    of_hidden = sum(own for *_, own, _ in found)
    torch.testing.assert_close(of_hidden.double(), wanted[2], rtol=0, atol=1e-5)
    of_weight = torch.cat([own for *_, own in found])
    torch.testing.assert_close(of_weight[:5].double(), wanted[3], rtol=0, atol=1e-5)
    assert (of_weight[5:] == 0).all()
