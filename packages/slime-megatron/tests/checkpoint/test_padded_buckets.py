"""Checkpoints of an optimizer whose gradients are in several buckets, some of which end in padding."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import CheckpointError
from slime_megatron.settings.section import MegatronSection

from ..batches import make_batch

SCHEDULE = {"lr": 1e-2}
ONE_BUCKET = MegatronSection(use_distributed_optimizer=True)
SEVERAL = MegatronSection(
    use_distributed_optimizer=True,
    megatron_args={"overlap_grad_reduce": True, "ddp_bucket_size": "20000"},
)
WHOLE = MegatronSection(use_distributed_optimizer=False)
MOMENTS = ("exp_avg", "exp_avg_sq")


def padding_of(learner):
    """Return how many numbers of padding each bucket ends in."""
    (buffer,) = learner._policy.model.buffers
    return [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]


def state_of(learner):
    """Return a parameter's name -> its master weight and moments, flat: of one process, which has all of each."""
    (optimizer,) = learner._policy.optimizer.chained_optimizers
    found = {}
    for name, weight in learner.model.named_parameters():
        if hasattr(optimizer, "model_param_group_index_map"):
            tensors = optimizer._get_main_param_and_optimizer_states(weight)
        else:
            master = getattr(weight, "main_param", weight)
            tensors = {"param": master} | optimizer.optimizer.state[master]
        found[name] = {kind: tensors[kind].detach().flatten().clone() for kind in ("param", *MOMENTS)}
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name][kind].equal(tensor)
        for name, tensors in wanted.items()
        for kind, tensor in tensors.items()
    )


def trained(learner, seeds):
    for seed in seeds:
        learner.train(make_batch(seed=seed, n_steps=2))
    return learner


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("reader", [SEVERAL, ONE_BUCKET, WHOLE], ids=["several", "one", "none"])
def test_master_weights_and_moments_are_found_where_others_look(make_learner, tmp_path, bf16, reader):
    options = SCHEDULE | {"bf16": bf16}
    learner = trained(make_learner(megatron=SEVERAL, **options), (0, 1))
    padding = padding_of(learner)
    assert len(padding) > 3
    assert any(padding[:-1])
    learner.save(tmp_path)
    saved = state_of(learner)
    wanted = state_of(trained(learner, (2, 3)))
    learner = make_learner(megatron=reader, **options)
    learner.load(tmp_path)
    assert same(state_of(learner), saved)
    assert same(state_of(trained(learner, (2, 3))), wanted)


def test_several_buckets_read_what_one_wrote(make_learner, tmp_path):
    learner = trained(make_learner(megatron=ONE_BUCKET, bf16=True, **SCHEDULE), (0, 1))
    assert len(padding_of(learner)) == 1
    learner.save(tmp_path)
    saved = state_of(learner)
    learner = make_learner(megatron=SEVERAL, bf16=True, **SCHEDULE)
    learner.load(tmp_path)
    assert same(state_of(learner), saved)


@pytest.fixture
def damaged(make_learner, tmp_path, monkeypatch):
    """Return a function that writes a folder as Megatron itself does, and returns it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def write(**options):
        learner = trained(make_learner(megatron=SEVERAL, **options), (0,))
        name = "sharded_param_state_fully_reshardable"
        ours = getattr(DistributedOptimizer, name)
        with monkeypatch.context() as patched:
            patched.setattr(DistributedOptimizer, name, getattr(ours, "__wrapped__", ours))
            learner.save(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("bf16", "reader"),
    [(True, SEVERAL), (False, SEVERAL), (True, ONE_BUCKET), (True, WHOLE), (False, WHOLE)],
    ids=["bf16", "fp32", "one bucket", "plain optimizer", "plain optimizer, fp32"],
)
def test_what_megatron_itself_wrote_is_refused_with_what_to_do(make_learner, damaged, bf16, reader):
    folder = damaged(bf16=bf16, **SCHEDULE)
    # Parameters are laid out last first: behind the last norm, fc2 and fc1 of the last layer the first bucket ends, and all
    # that follows is beside its place.
    wanted = (
        r"found master weights of embedding\.word_embeddings\.weight and \d+ others that its weights are not rounded from; .*"
        rf"--actor-load {folder} "
    )
    with pytest.raises(CheckpointError, match=wanted):
        make_learner(megatron=reader, bf16=bf16, **SCHEDULE).load(folder)


def test_another_run_starts_from_its_weights(make_learner, damaged):
    folder = damaged(bf16=True, **SCHEDULE)
    stored = make_learner(megatron=SEVERAL, bf16=True, **SCHEDULE)
    with pytest.raises(CheckpointError):
        stored.load(folder)
    wanted = {name: weight.detach().clone() for name, weight in stored.model.named_parameters()}
    fresh = make_learner(megatron=SEVERAL, bf16=True, settings={"actor_path": folder}, **SCHEDULE)
    assert all(torch.equal(wanted[name], weight) for name, weight in fresh.model.named_parameters())
    assert fresh.train(make_batch(seed=1))["train/skipped_steps"] == 0
