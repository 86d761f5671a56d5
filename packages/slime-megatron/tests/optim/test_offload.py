"""Memory of weights and of an optimizer that is given up and taken back: who sees what. How much a GPU has free then: `test_cuda.py`."""

from __future__ import annotations

import pytest
import torch
from slime_megatron.settings.section import MegatronSection
from torch import nn

from ..batches import make_batch

CPU = torch.device("cpu")


class Flat(nn.Module):
    """Two parameters that are parts of one buffer, as Megatron's are with a distributed optimizer, and one of its own."""

    def __init__(self):
        super().__init__()
        self.flat = torch.arange(10.0)
        self.first = nn.Parameter(self.flat[:6].view(2, 3))
        self.second = nn.Parameter(self.flat[6:])
        self.alone = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.full((2,), 7.0))


def test_memory_is_given_up_once_and_all_views_see_the_numbers_again():
    from slime_megatron.optim.offload import to_device, to_host, weights_of

    model = Flat()
    master = model.first.data.view(-1)[1:3]  # as float32 weights are their own master weights
    offloaded = to_host(weights_of(model), CPU)
    assert sorted(each.held.numel() for each in offloaded) == [2 * 4, 3 * 4, 10 * 4]
    assert model.flat.untyped_storage().nbytes() == model.alone.untyped_storage().nbytes() == 0
    assert model.first.shape == (2, 3)
    to_device(offloaded)
    assert model.first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.second.tolist() == [6, 7, 8, 9]
    assert (model.alone.tolist(), model.bias.tolist(), master.tolist()) == ([1, 1, 1], [7, 7], [1, 2])
    with torch.no_grad():
        model.first += 1
    assert (master.tolist(), model.flat[:3].tolist()) == ([2, 3], [1, 2, 3])


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
def test_a_learner_goes_on_as_if_weights_and_state_had_never_left(make_learner, distributed, bf16):
    from slime_megatron.optim.offload import state_of, to_device, to_host, weights_of
    from slime_megatron.parallel.process_groups import device

    section = MegatronSection(use_distributed_optimizer=distributed)

    def trained(*, leave):
        learner = make_learner(bf16=bf16, megatron=section)
        learner.train(make_batch())
        if leave:
            policy = learner._policy
            state = to_host(state_of(policy.optimizer), device(), but=policy.model.parameters())
            assert all(weight.untyped_storage().nbytes() for weight in learner.model.parameters())
            n_weights = sum(weight.numel() for weight in learner.model.parameters())
            n_each = 3 if bf16 else 2  # master weight and two moments; a float32 weight is its own master
            assert sum(each.held.numel() for each in state) >= n_each * 4 * n_weights
            weights = to_host(weights_of(policy.model.module), device())
            assert not any(weight.untyped_storage().nbytes() for weight in learner.model.parameters())
            to_device(weights)
            to_device(state)
        metrics = learner.train(make_batch(seed=1))
        weights = {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}
        return (metrics["train/loss"], metrics["train/grad_norm"]), weights

    (found, weights), (wanted, others) = trained(leave=True), trained(leave=False)
    assert found == wanted
    assert all(weight.equal(others[name]) for name, weight in weights.items())
