"""Reference, teacher and earlier policies: whose log-probs losses see, and that the policy's weights come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.errors import CheckpointError, SampleError, TrainerError
from slime_core.samples import VersionSpans
from slime_megatron.optim.weight_sets import WeightSets
from slime_megatron.settings.section_roles import RolesSection

from ..batches import hf_log_probs, make_batch
from ..comparison import near
from ..views import recording


def in_order(batch, views, name):
    """Return a column [T] of the batch, put together from the views of its single samples."""
    assert len(views) == len(batch)
    longest_first = sorted(range(len(batch)), key=lambda i: (-batch.lengths[i], i))
    found = dict(zip(longest_first, (getattr(view, name) for view in views), strict=True))
    return torch.cat([found[i] for i in range(len(batch))])


def snapshot(learner):
    optimizer = learner._policy.optimizer
    masters = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in learner.model.parameters()], masters


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_the_reference_is_the_initial_policy_and_stays_so(make_learner, qwen3):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2)
    wanted = hf_log_probs(qwen3[0], batch).detach()
    for _ in range(2):
        learner.train(batch)
    first, second = views
    torch.testing.assert_close(first.ref_log_probs, wanted, rtol=0, atol=near(1e-5))
    assert torch.equal(first.ref_log_probs, first.old_log_probs)
    assert torch.equal(second.ref_log_probs, first.ref_log_probs)
    assert (second.old_log_probs - second.ref_log_probs).abs().max() > 1e-2  # the policy has moved


def test_a_reference_of_its_own_folder_and_a_teacher_are_those_folders(make_learner, other):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording("ref_log_probs", "teacher_log_probs")
    make_learner(algorithm, settings={"ref_path": other[1], "teacher_path": other[1]}).train(batch)
    wanted = hf_log_probs(other[0], batch).detach()
    torch.testing.assert_close(views[0].ref_log_probs, wanted, rtol=0, atol=near(1e-5))
    assert torch.equal(views[0].teacher_log_probs, views[0].ref_log_probs)
    assert (views[0].old_log_probs - wanted).abs().max() > 1e-2


def test_a_reference_of_another_architecture_is_refused_by_the_field(make_learner, make_hf):
    _, folder = make_hf("qwen3", head_dim=32, num_hidden_layers=2)
    algorithm, _ = recording("ref_log_probs")
    with pytest.raises(CheckpointError, match=r"ref .*num_layers is 2, the policy's is 3"):
        make_learner(algorithm, settings={"ref_path": folder})


@pytest.mark.parametrize("bf16", [False, True])
def test_after_a_switch_and_back_weights_and_masters_are_the_same_bits(make_learner, other, bf16):
    algorithm, _ = recording("ref_log_probs")
    learner = make_learner(algorithm, bf16=bf16, settings={"ref_path": other[1]})
    learner.train(make_batch())
    before = snapshot(learner)
    with pytest.raises(KeyboardInterrupt), learner._weight_sets.swapped_in("ref"):
        assert not same(before, snapshot(learner))
        raise KeyboardInterrupt
    assert same(before, snapshot(learner))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_reference_that_nobody_weighs_changes_no_bit_of_training(make_learner, other, bf16):
    found = []
    for needs in ((), ("ref_log_probs", "teacher_log_probs")):
        algorithm, _ = recording(*needs)
        paths = {"ref_path": other[1], "teacher_path": other[1]}
        learner = make_learner(algorithm, bf16=bf16, lr=1e-2, settings=paths)
        for seed in range(2):
            learner.train(make_batch(seed=seed, n_steps=2))
        found.append(snapshot(learner))
    assert same(*found)


def test_the_reference_becomes_the_policy_at_its_interval(make_learner):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2, settings={"roles": RolesSection(ref_update_interval=2)})
    for step in range(1, 5):
        learner.train(replace(batch, step=step))
    initial = views[0].old_log_probs
    assert torch.equal(views[1].ref_log_probs, initial)
    assert torch.equal(views[2].ref_log_probs, views[2].old_log_probs)  # updated after step 2
    assert torch.equal(views[3].ref_log_probs, views[2].old_log_probs)
    assert not torch.equal(views[3].ref_log_probs, views[3].old_log_probs)


def test_an_updated_reference_is_resumed(make_learner, tmp_path):
    batch = make_batch(lengths=((5, 9),))
    settings = {"roles": RolesSection(ref_update_interval=2)}
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2, settings=settings)
    for step in range(1, 4):
        learner.train(replace(batch, step=step))
    learner.save(tmp_path)
    learner.train(replace(batch, step=4))
    learner = make_learner(algorithm, lr=1e-2, settings=settings)
    learner.load(tmp_path)
    learner.train(replace(batch, step=4))
    assert torch.equal(views[4].ref_log_probs, views[3].ref_log_probs)
    assert torch.equal(views[4].old_log_probs, views[3].old_log_probs)


def generated_by(batch, *versions):
    """Return the batch with samples of one version each."""
    spans = VersionSpans(versions=np.array(versions), offsets=batch.response_offsets)
    return replace(batch, weight_versions=spans)


def test_old_log_probs_are_those_of_the_weights_that_generated_each_sample(make_learner):
    batch = make_batch(lengths=((5, 9), (6, 7)))
    algorithm, views = recording()
    learner = make_learner(
        algorithm, lr=1e-2, max_tokens_per_gpu=1, settings={"roles": RolesSection(keep_old_actor=True)}
    )
    learner.mark_sent("0")
    learner.train(generated_by(batch, 0, 0))
    learner.mark_sent("1")
    learner.train(generated_by(batch, 0, 1))
    by_zero, by_one = (in_order(batch, views[k : k + 2], "old_log_probs") for k in (0, 2))
    now = in_order(batch, views[2:4], "log_probs").detach()
    assert torch.equal(by_zero[:9], by_one[:9])
    assert torch.equal(by_one[9:], now[9:])
    assert (by_one[:9] - now[:9]).abs().max() > 1e-2


def test_old_log_probs_of_a_sample_with_tokens_of_two_versions_are_each_tokens_own(make_learner):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording()
    learner = make_learner(algorithm, lr=1e-2, settings={"roles": RolesSection(keep_old_actor=True)})
    learner.mark_sent("0")
    learner.train(generated_by(batch, 0))
    learner.mark_sent("1")
    learner.train(generated_by(batch, 1))
    spans = VersionSpans(versions=np.array([0, 1]), offsets=np.array([0, 4, 9]))
    learner.train(replace(batch, weight_versions=spans))
    by_zero, by_one, mixed = (view.old_log_probs for view in views)
    assert (by_zero - by_one).abs().min() > 1e-4
    assert torch.equal(mixed, torch.cat([by_zero[:4], by_one[4:]]))


@pytest.mark.parametrize("bf16", [False, True])
def test_one_step_off_old_log_probs_are_to_the_bit_those_of_a_fresh_trainer_of_that_version(
    make_learner, tmp_path, bf16
):
    """Steps 2 and 3 train what versions 0 and 1 generated; a trainer that begins with these weights agrees in every bit."""
    batch = make_batch(lengths=((5, 9), (6, 7)))
    algorithm, views = recording()
    learner = make_learner(
        algorithm, lr=1e-2, bf16=bf16, settings={"roles": RolesSection(keep_old_actor=True)}
    )
    learner.mark_sent("0")
    learner.train(generated_by(batch, 0, 0))
    learner.mark_sent("1")
    learner.save_hf(tmp_path / "version-1")
    learner.train(generated_by(batch, 0, 0))
    learner.mark_sent("2")
    learner.train(generated_by(batch, 1, 1))
    by_zero, by_one = views[1].old_log_probs, views[2].old_log_probs
    for old, folder in ((by_zero, {}), (by_one, {"folder": tmp_path / "version-1"})):
        algorithm, fresh = recording()
        make_learner(algorithm, lr=1e-2, bf16=bf16, **folder).train(batch)
        assert torch.equal(old, fresh[0].log_probs.detach())
    assert (by_zero - by_one).abs().max() > 1e-2


def test_masked_tokens_of_weights_that_are_gone_do_not_stop_the_step(make_learner):
    batch = make_batch(lengths=((5, 9),))
    batch = replace(batch, loss_mask=np.array([0] * 4 + [1] * 5, dtype=np.float32))
    algorithm, views = recording()
    learner = make_learner(algorithm, settings={"roles": RolesSection(keep_old_actor=True)})
    for version in ("1", "2"):
        learner.mark_sent(version)
    spans = VersionSpans(versions=np.array([0, 2]), offsets=np.array([0, 4, 9]))
    learner.train(replace(batch, weight_versions=spans))
    assert torch.equal(views[0].old_log_probs, views[0].log_probs)


def test_losses_that_read_it_see_the_staleness_of_each_token(make_learner):
    batch = replace(make_batch(lengths=((5, 9), (6, 7))), step=4)
    spans = VersionSpans(versions=np.array([1, 3, 2]), offsets=np.array([0, 4, 9, 16]))
    batch = replace(batch, weight_versions=spans)  # step 4 trains the weights of version 3
    algorithm, views = recording("staleness")
    make_learner(algorithm, max_tokens_per_gpu=1).train(batch)
    assert in_order(batch, views, "staleness").tolist() == [2] * 4 + [0] * 5 + [1] * 7
    algorithm, views = recording()
    make_learner(algorithm).train(batch)
    assert views[0].staleness is None
    algorithm, _ = recording("staleness")
    with pytest.raises(SampleError, match="sample 100: the weights of response token 0 are not known"):
        make_learner(algorithm).train(replace(batch, weight_versions=None))


def test_the_weights_of_earlier_syncs_are_resumed(make_learner, tmp_path):
    batch = make_batch(lengths=((5, 9),))
    settings = {"roles": RolesSection(keep_old_actor=True)}
    algorithm, views = recording()
    learner = make_learner(algorithm, lr=1e-2, settings=settings)
    learner.mark_sent("0")
    learner.train(generated_by(batch, 0))
    learner.mark_sent("1")
    learner.save(tmp_path)
    learner = make_learner(algorithm, lr=1e-2, settings=settings)
    learner.load(tmp_path)
    learner.mark_sent("1")
    learner.train(generated_by(batch, 0))
    assert torch.equal(views[1].old_log_probs, views[0].old_log_probs)
    assert not torch.equal(views[1].log_probs, views[0].log_probs)
    learner = make_learner(algorithm, lr=1e-2)
    learner.load(tmp_path)
    assert list(learner._weight_sets) == []


def test_a_version_that_is_no_longer_held_is_named(make_learner):
    learner = make_learner(settings={"roles": RolesSection(keep_old_actor=True)})
    for version in ("0", "1", "2"):
        learner.mark_sent(version)
    batch = make_batch(lengths=((5, 9), (6, 7)))
    with pytest.raises(
        TrainerError, match="sample 101 was generated by weight version 0; the weights of 1, 2"
    ):
        learner.train(generated_by(batch, 2, 0))


def test_a_role_taken_from_the_model_holds_the_trained_parameters_only():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].weight.requires_grad = False
    weight_sets = WeightSets(model)
    weight_sets.snapshot("ref", checkpointed=False)
    assert set(weight_sets._sets["ref"]) == {"0.bias", "1.weight", "1.bias"}
    with torch.no_grad():
        model[1].bias.fill_(5)
    with weight_sets.swapped_in("ref"):
        assert not (model[1].bias == 5).any()
    assert (model[1].bias == 5).all()
