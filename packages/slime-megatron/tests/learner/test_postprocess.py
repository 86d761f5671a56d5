"""A user's function between advantages and training: what it sees, and what comes of what it changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slime_core.errors import TrainerError
from slime_megatron.settings.user_hooks import MegatronHooks

from ..batches import make_batch
from ..views import recording


def learner_with(make_learner, function):
    algorithm, seen = recording()
    return make_learner(algorithm, settings={"hooks": MegatronHooks(rollout_data=function)}), seen


def weights(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


def test_it_sees_each_sample_and_its_masks_keep_tokens_from_training(make_learner):
    batch, told = make_batch(), []

    def mask_all(args, rollout_id, data):
        told.append((args.seed, rollout_id, data))
        for mask in data["loss_masks"]:
            mask.zero_()

    learner, _ = learner_with(make_learner, mask_all)
    before = weights(learner)
    learner.train(batch)
    ((seed, rollout_id, data),) = told
    assert (seed, rollout_id) == (1, batch.step - 1)
    assert data["response_lengths"] == batch.response_lengths.tolist()
    assert [part.tolist() for part in data["tokens"]] == [
        part.tolist() for part in np.split(batch.tokens, batch.offsets[1:-1])
    ]
    assert data["rewards"] == batch.rewards.tolist()
    assert [len(part) for part in data["advantages"]] == data["response_lengths"]
    assert torch.equal(weights(learner), before)


def test_advantages_that_it_puts_in_their_place_are_trained_on(make_learner):
    def double(args, rollout_id, data):
        first, *others = (2 * part for part in data["advantages"])
        data["advantages"] = [first.tolist(), *others]  # wherever those are, this one is on the host

    def double_in_place(args, rollout_id, data):
        for part in data["advantages"]:
            part *= 2

    after = []
    for function in (double, double_in_place, None):
        learner, _ = learner_with(make_learner, function)
        learner.train(make_batch())
        after.append(learner.model.decoder.layers[0].mlp.linear_fc2.weight.main_grad.clone())
    assert torch.equal(after[0], after[1])
    torch.testing.assert_close(after[0], 2 * after[2])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["advantages"].pop(), "left advantages of the shapes"),
        (lambda data: data["returns"][0].fill_(float("nan")), "left returns that are not finite"),
        (lambda data: data["loss_masks"][0].fill_(2), "left a loss mask that is neither 0 nor what it was"),
        (lambda data: data["loss_masks"][0].fill_(0.5), "left a loss mask that is neither 0 nor what it was"),
        (
            lambda data: data.update(advantages=["a"] * len(data["advantages"])),
            "left advantages that are no tensors",
        ),
        (
            lambda data: data.update(returns=[torch.stack([part, part], 1) for part in data["returns"]]),
            "left returns of the shapes",
        ),
        (lambda data: data["nothing"], "raised KeyError: 'nothing'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(make_learner, change, told):
    learner, _ = learner_with(make_learner, lambda args, rollout_id, data: change(data))
    with pytest.raises(TrainerError, match=told):
        learner.train(make_batch())
