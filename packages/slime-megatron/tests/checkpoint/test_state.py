"""Saving, loading and going on, bit for bit; and what is refused."""

from __future__ import annotations

import json
import resource
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from slime_algos.advantages.grpo import grpo
from slime_core.errors import CheckpointError
from slime_core.protocols import needs_of
from slime_core.run.assemble import Algorithm
from slime_core.samples import VersionSpans
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import RolesSection

from ..algorithms import policy_gradient
from ..batches import make_batch

SCHEDULE = {
    "lr": 1e-2,
    "lr_decay_style": "linear",
    "lr_decay_iters": 20,
    "lr_warmup_iters": 1,
    "clip_grad": 1.0,
}


def weights_of(learner):
    return {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_going_on_from_a_checkpoint_equals_never_having_stopped(make_learner, tmp_path, bf16):
    learner = make_learner(bf16=bf16, **SCHEDULE)
    for seed in range(2):
        learner.train(make_batch(seed=seed, n_steps=2))
    learner.save(tmp_path)
    saved = weights_of(learner)
    unbroken = [learner.train(make_batch(seed=seed, n_steps=2)) for seed in (2, 3)]
    wanted = weights_of(learner)
    state = torch.get_rng_state()

    learner = make_learner(bf16=bf16, **SCHEDULE)
    learner.train(make_batch(seed=9))  # loading must undo this
    torch.rand(3)
    learner.load(tmp_path)
    assert all(torch.equal(saved[name], found) for name, found in weights_of(learner).items())
    resumed = [learner.train(make_batch(seed=seed, n_steps=2)) for seed in (2, 3)]
    assert all(torch.equal(wanted[name], found) for name, found in weights_of(learner).items())
    assert any(not torch.equal(wanted[name], saved[name]) for name in wanted)
    for one, other in zip(unbroken, resumed, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert one[name] == other[name]
    assert torch.equal(torch.get_rng_state(), state)


def test_an_estimators_state_goes_on_from_a_checkpoint(make_learner, tmp_path):
    credit = partial(grpo, kl_coef=0.5, kl_target=0.1, kl_horizon=50.0)
    wants = needs_of(grpo, credit.keywords)
    algorithm = Algorithm(credit, policy_gradient().loss, wants, "raw")
    learner = make_learner(algorithm, lr=1e-2)
    first = [learner.train(make_batch(seed=seed)) for seed in range(3)]
    coefs = [metrics["train/kl_coef"] for metrics in first]
    # 6 samples of 50: at most 2.4% a batch; the first batch's divergence from the initial weights is 0
    assert coefs[:2] == [0.5, pytest.approx(0.5 * (1 - 0.2 * 6 / 50))]
    learner.save(tmp_path)
    unbroken = learner.train(make_batch(seed=3))

    learner = make_learner(algorithm, lr=1e-2)
    learner.load(tmp_path)
    resumed = learner.train(make_batch(seed=3))
    for name in ("train/kl_coef", "train/reward_kl", "train/loss"):
        assert resumed[name] == unbroken[name]
    assert resumed["train/kl_coef"] not in coefs


def test_master_weights_are_restored_beyond_bf16(make_learner, tmp_path):
    learner = make_learner(bf16=True, lr=1e-6)
    learner.train(make_batch())
    masters = [p.main_param.clone() for p in learner.model.parameters()]
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)
    learner.save(tmp_path)
    learner = make_learner(bf16=True, lr=1e-6)
    learner.load(tmp_path)
    assert all(torch.equal(p.main_param, m) for p, m in zip(learner.model.parameters(), masters, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture.num_layers": 4}, r"architecture.num_layers is 4, this trainer's is 3"),
        (
            {"architecture.model_type": "llama"},
            r"architecture.model_type is 'llama', this trainer's is 'qwen3'",
        ),
        ({"bf16": True}, r"bf16 is True, this trainer's is False"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_field_that_differs(
    make_learner, tmp_path, change, message
):
    learner = make_learner()
    learner.save(tmp_path)
    path = tmp_path / "trainer.json"
    description = json.loads(path.read_text())
    for key, value in change.items():
        *outer, name = key.split(".")
        table = description[outer[0]] if outer else description
        table[name] = value
    path.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=message):
        learner.load(tmp_path)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_saved_in_the_background_it_goes_on_from_where_the_save_began(make_learner, tmp_path, bf16):
    learner = make_learner(bf16=bf16, **SCHEDULE)
    saved, after = {}, {}
    for seed in (0, 1):  # the second save copies to where the first did
        folder = tmp_path / str(seed)
        learner.train(make_batch(seed=seed, n_steps=2))
        saved[folder] = weights_of(learner), moments_of(learner)
        may_write = held_back(learner)
        learner.save(folder, in_background=True)
        after[folder] = learner.train(make_batch(seed=seed + 2)), weights_of(learner)
        assert not learner.written(wait=False)
        assert not (folder / "trainer.json").exists()
        may_write.set()
        assert learner.written(wait=True)
    for folder, (weights, moments) in saved.items():
        learner = make_learner(bf16=bf16, **SCHEDULE)
        learner.load(folder)
        assert all(torch.equal(weights[name], found) for name, found in weights_of(learner).items())
        assert all(torch.equal(one, other) for one, other in zip(moments, moments_of(learner), strict=True))
        metrics = learner.train(make_batch(seed=int(folder.name) + 2))
        assert all(torch.equal(after[folder][1][name], found) for name, found in weights_of(learner).items())
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert metrics[name] == after[folder][0][name]


def held_back(learner):
    """Give the thread that writes something else to do first, until the event that is returned is set."""
    may_write = threading.Event()
    learner._checkpoint_writer._thread.submit(may_write.wait)
    return may_write


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "with-roles"])
def test_where_some_layers_are_frozen_it_goes_on_as_anywhere(make_learner, tmp_path, shares, keeps):
    """What optimizer and roles have of the others is no tensor of all layers."""
    section = MegatronSection(freeze_params_name_list=[r"layers\.0\."], use_distributed_optimizer=shares)
    settings = {"roles": RolesSection(keep_old_actor=keeps)}

    def batch(seed):
        made = make_batch(seed=seed)
        versions = np.ones(len(made.response_offsets) - 1, dtype=int)
        return replace(made, weight_versions=VersionSpans(versions=versions, offsets=made.response_offsets))

    learner = make_learner(megatron=section, settings=settings, bf16=True, **SCHEDULE)
    learner.mark_sent("1")
    learner.train(batch(0))
    learner.save(tmp_path)
    unbroken = [learner.train(batch(seed))["train/grad_norm"] for seed in (1, 2)]
    wanted = weights_of(learner)
    learner = make_learner(megatron=section, settings=settings, bf16=True, **SCHEDULE)
    learner.mark_sent("1")
    learner.train(batch(9))
    learner.load(tmp_path)
    assert [learner.train(batch(seed))["train/grad_norm"] for seed in (1, 2)] == unbroken
    assert all(torch.equal(wanted[name], found) for name, found in weights_of(learner).items())
    others = MegatronSection(use_distributed_optimizer=shares)
    with pytest.raises(CheckpointError, match=r"trains_layers_alike is False, .*of which the same layers"):
        make_learner(megatron=others, bf16=True, **SCHEDULE).load(tmp_path)


def test_saves_in_the_background_hold_no_more_host_memory_the_more_there_are(make_learner, tmp_path):
    """Earlier policies have other names in each."""
    learner = make_learner(settings={"roles": RolesSection(keep_old_actor=True)}, bf16=True, **SCHEDULE)
    held = []
    for number in range(5):
        learner.mark_sent(str(number))
        learner.save(tmp_path / str(number), in_background=True)
        assert learner.written(wait=True)
        copies = learner._checkpoint_writer._copies.values()
        held.append(sum(copy.nbytes for alike in copies for copy in alike))
    assert held[0] < held[2] == held[3] == held[4]


@pytest.mark.parametrize("in_background", [False, True], ids=["", "background"])
def test_a_full_disk_is_an_error_that_says_so(make_learner, tmp_path, monkeypatch, in_background):
    """No file may be larger than 4 kB, as if there were no more room."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut, too
    learner = make_learner()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        if in_background:
            learner.save(tmp_path / "first", in_background=True)
        with pytest.raises(CheckpointError, match=r"rank 0: .*File too large"):
            learner.save(tmp_path / "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "second").exists() != in_background  # told of before the next began
    learner.save(tmp_path / "third")
    make_learner().load(tmp_path / "third")


def test_an_incomplete_folder_is_refused(make_learner, tmp_path):
    learner = make_learner()
    with pytest.raises(CheckpointError, match=r"has no trainer\.json"):
        learner.load(tmp_path)
    learner.save(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load(tmp_path)


def test_the_description_says_what_wrote_it(make_learner, tmp_path):
    learner = make_learner()
    learner.train(make_batch(n_steps=2))
    learner.save(tmp_path)
    description = json.loads((tmp_path / "trainer.json").read_text())
    assert description["optimizer_steps"] == 2
    assert description["architecture"]["hidden_size"] == 64
    assert set(description["versions"]) == {"megatron-core", "torch", "slime-megatron"}


OTHERS = {
    "lr": 4e-3,
    "min_lr": 1e-3,
    "lr_warmup_iters": 3,
    "lr_decay_iters": 10,
    "weight_decay": 0.1,
    "adam_beta2": 0.9,
}


@pytest.mark.parametrize(
    "megatron", [{}, {"use_distributed_optimizer": True}], ids=["", "distributed optimizer"]
)
def test_other_settings_of_the_optimizer_are_taken_and_told(make_learner, tmp_path, caplog, megatron):
    def told():
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == "slime_megatron.checkpoint.state"
        ]

    section = MegatronSection(**megatron)
    learner = make_learner(megatron=section, **SCHEDULE)
    for seed in range(2):
        learner.train(make_batch(seed=seed, n_steps=2))
    learner.save(tmp_path)
    saved = weights_of(learner)
    kept = moments_of(learner)

    same = make_learner(megatron=section, **SCHEDULE)
    same.load(tmp_path)
    assert not told()
    learner = make_learner(megatron=section, **SCHEDULE | OTHERS)
    learner.load(tmp_path)
    assert all(torch.equal(saved[name], found) for name, found in weights_of(learner).items())
    assert all(torch.equal(one, other) for one, other in zip(kept, moments_of(learner), strict=True))
    assert {group["betas"][1] for group in learner._policy.optimizer.param_groups} == {0.9}
    assert told() == [
        "resuming at optimizer step 4 with other settings than before: lr 0.01 -> 0.004, min_lr 0.0 -> 0.001, "
        "lr_warmup_iters 1 -> 3, weight_decay 0.0 -> 0.1, lr_decay_iters 20 -> 10, adam_beta2 0.98 -> 0.9"
    ]
    # step 4 is 1 of the 7 after the warm-up: 0.001 + 6/7 of 0.003
    assert learner.train(make_batch(seed=2))["train/lr"] == pytest.approx(0.001 + 0.003 * 6 / 7, rel=1e-9)
    assert any(group["weight_decay"] == 0.1 for group in learner._policy.optimizer.param_groups)


@pytest.mark.parametrize("shares", [False, True], ids=["", "distributed optimizer"])
def test_a_learning_rate_of_their_own_stays_that_of_embedding_and_output_layer(
    make_learner, tmp_path, shares
):
    """A folder of a run without it is another optimizer's."""

    def learner_with(**flags):
        section = MegatronSection(use_distributed_optimizer=shares, megatron_args=flags)
        return make_learner(megatron=section, **SCHEDULE)

    learner = learner_with(decoupled_lr="0.5")
    learner.train(make_batch(n_steps=2))
    learner.save(tmp_path / "two")
    unbroken, wanted = learner.train(make_batch(seed=1, n_steps=2)), weights_of(learner)
    learner = learner_with(decoupled_lr="0.5")
    learner.load(tmp_path / "two")
    # All but norms and biases, which have no weight decay; norms; the embedding, which is the output layer: it is tied.
    rates = [(group["wd_mult"], group["max_lr"]) for group in learner._policy.optimizer.param_groups]
    assert sorted(rates) == [(0.0, 1e-2), (1.0, 1e-2), (1.0, 0.5)]
    resumed = learner.train(make_batch(seed=1, n_steps=2))
    assert resumed["train/grad_norm"] == unbroken["train/grad_norm"]
    assert same(weights_of(learner), wanted)
    learner_with().save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"by as many learning rates|'param_groups'"):
        learner_with(decoupled_lr="0.5").load(tmp_path / "one")


@pytest.mark.parametrize("clip_grad", [0.0, 1e-3])
def test_an_optimizer_on_the_host_steps_as_one_on_the_device_and_resumes_exactly(
    make_learner, tmp_path, clip_grad
):
    """Megatron's own class for it, on copies of the parameters; also where gradients are clipped, which it has apart.

    On a CPU to the bit. CUDA's AdamW rounds otherwise, so a weight may be another number of bfloat16, and a gradient near 0 point the
    other way: there the weights must have moved alike, but for a twentieth of their way.
    """
    offloaded = MegatronSection(megatron_args={"optimizer_cpu_offload": True})
    options = SCHEDULE | {"bf16": True, "clip_grad": clip_grad}

    def trained(learner, seeds):
        for seed in seeds:
            learner.train(make_batch(seed=seed, n_steps=2))
        return weights_of(learner)

    shared = MegatronSection(use_distributed_optimizer=True)
    wanted = trained(make_learner(megatron=shared, **options), range(2))
    learner = make_learner(megatron=offloaded, **options)
    assert type(learner._policy.optimizer.chained_optimizers[0].optimizer).__name__ == "HybridDeviceOptimizer"
    before = weights_of(learner)
    learner.save(tmp_path / "first")
    saved = trained(learner, range(2))
    learner.save(tmp_path / "second")
    assert not same(saved, before)
    if torch.cuda.is_available():
        assert distance(saved, wanted) <= distance(wanted, before) / 20
    else:
        assert same(saved, wanted)
    goes_on = trained(learner, [2])
    again = make_learner(megatron=offloaded, **options)
    again.load(tmp_path / "second")
    assert same(weights_of(again), saved)
    assert same(trained(again, [2]), goes_on)
    again.load(tmp_path / "first")
    assert same(weights_of(again), before)
    assert same(trained(again, range(2)), saved)


def distance(found, wanted):
    """Return the root of the sum of squared differences."""
    assert found.keys() == wanted.keys()
    return torch.stack([(found[name].float() - each.float()).norm() for name, each in wanted.items()]).norm()


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        torch.equal(wanted[name], each) for name, each in found.items()
    )


def moments_of(learner):
    return [
        state[name].clone()
        for each in learner._policy.optimizer.chained_optimizers
        for state in each.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
