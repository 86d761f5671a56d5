"""Log-probs of tensors of the device cuda that have no data: needs no GPU, and computes nothing.

The backward pass is called as a function: torch's autograd wants a real device.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device

R, HIDDEN, VOCAB = 10, 16, 250


class Saved(SimpleNamespace):
    """What autograd's context is to a function."""

    needs_input_grad = (True, True)

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        pass


@pytest.fixture(params=[1, 4], ids=["alone", "a quarter of the vocabulary"])
def vocabulary(request):
    """Return which ids the columns are: all, or those of the second of four ranks, whose communication does nothing."""
    from slime_megatron.model.log_probs import VocabularyShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if request.param == 1:
        yield VocabularyShard(VOCAB)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield VocabularyShard(VOCAB, start=VOCAB // 4, group=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("masked", [False, True], ids=["", "sampling mask"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
def test_forward_and_backward_stay_on_the_device_and_nothing_waits(vocabulary, with_entropy, masked):
    from slime_megatron.batch.sampling_mask import SamplingMask
    from slime_megatron.model import log_probs

    columns = VOCAB if vocabulary.group is None else VOCAB // 4
    with cuda_without_device() as counted:
        hidden, weight = (torch.empty(n, HIDDEN, dtype=torch.bfloat16, device=CUDA) for n in (R, columns))
        targets, gradient = torch.zeros(R, dtype=torch.int64, device=CUDA), torch.empty(R, device=CUDA)
        mask = SamplingMask(torch.zeros(3 * R, dtype=torch.int64, device=CUDA), np.arange(0, 3 * R + 1, 3))
        given = mask if masked else None
        with torch.no_grad():
            squares = log_probs.sum_pi_squared(
                hidden, weight, vocabulary=vocabulary, temperature=0.7, sampling_mask=given, chunk_tokens=4
            )
            saved, function = Saved(), log_probs._TokenLogProbs
            found, entropy = function.forward(
                saved, hidden, weight, targets, vocabulary, 0.7, given, with_entropy, 4
            )
            of_hidden, of_weight, *_ = function.backward(saved, gradient, gradient)
    assert not counted.waits
    assert all(x.is_cuda for x in (squares, found, entropy, of_hidden, of_weight))
    assert (squares.shape, found.shape, entropy.shape) == ((R,), (R,), (R if with_entropy else 0,))
    assert (of_hidden.shape, of_weight.shape) == (hidden.shape, weight.shape)
    assert (of_hidden.dtype, of_weight.dtype) == (torch.bfloat16, torch.bfloat16)


def launches(n_chunks, **options):
    """Return what is launched for so many chunks of four tokens."""
    from slime_megatron.model.log_probs import token_log_probs

    with cuda_without_device() as counted, torch.no_grad():
        n = 4 * n_chunks
        hidden, weight = (torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=CUDA) for rows in (n, VOCAB))
        targets = torch.zeros(n, dtype=torch.int64, device=CUDA)
        before = len(counted.operations)
        token_log_probs(hidden, weight, targets, chunk_tokens=4, **options)
    return len(counted.operations) - before


def test_operations_of_a_chunk_of_tokens():
    """A product, the kernel, and copies of the two tensors that it returns."""
    assert launches(3) - launches(2) == 4
    assert launches(3, temperature=0.7) - launches(2, temperature=0.7) == 4
    assert launches(3, with_entropy=True) - launches(2, with_entropy=True) == 4
    assert launches(2) - 2 * 4 <= 3
