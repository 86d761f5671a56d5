"""float16: gradients as in float32, overflows that skip a step, and the scale of the loss over a checkpoint."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import CheckpointError, TrainerError
from slime_megatron.settings.section import MegatronSection

from ..batches import make_batch

#: The scale falls by half with every overflow.
FALLING = {"initial_loss_scale": str(2.0**60), "hysteresis": "1"}


def weights_of(learner):
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def test_gradients_are_those_of_float32(make_learner):
    learner = make_learner()
    wanted = learner.train(make_batch()), [p.main_grad.clone() for p in learner.model.parameters()]
    learner = make_learner(fp16=True)
    found = learner.train(make_batch())
    assert {p.dtype for p in learner.model.parameters()} == {torch.float16}
    assert found["train/loss_scale"] == 2**16
    assert found["train/loss"] == pytest.approx(wanted[0]["train/loss"], abs=2e-3)
    assert found["train/grad_norm"] == pytest.approx(wanted[0]["train/grad_norm"], rel=5e-3)
    for parameter, exact in zip(learner.model.parameters(), wanted[1], strict=True):
        assert (parameter.main_grad - exact).norm() <= 2e-2 * exact.norm()


def test_overflows_are_skipped_until_the_scale_fits(make_learner):
    """More of them in a row than `max_skipped_steps`."""
    learner = make_learner(fp16=True, megatron=MegatronSection(megatron_args=FALLING))
    before = weights_of(learner)
    scales = []
    while "train/grad_norm" not in (metrics := learner.train(make_batch())):
        assert metrics["train/skipped_steps"] == 1
        assert all(map(torch.equal, before, weights_of(learner)))
        scales.append(metrics["train/loss_scale"])
    assert len(scales) > 10
    assert scales == [2.0 ** (60 - k) for k in range(len(scales))]
    assert not all(map(torch.equal, before, weights_of(learner)))


def test_overflows_at_the_least_scale_stop_the_run(make_learner):
    least = FALLING | {"min_loss_scale": FALLING["initial_loss_scale"]}
    learner = make_learner(fp16=True, megatron=MegatronSection(megatron_args=least))
    for _ in range(3):
        learner.train(make_batch())
    with pytest.raises(TrainerError, match="4 optimizer steps in a row were skipped"):
        learner.train(make_batch())


@pytest.mark.parametrize(
    ("scale", "shared"),
    [(2.0**12, False), (2.0**12, True), (2.0**60, False)],
    ids=["", "distributed optimizer", "before the first step"],
)
def test_the_scale_goes_on_from_a_checkpoint(make_learner, tmp_path, scale, shared):
    megatron = MegatronSection(
        megatron_args=FALLING | {"initial_loss_scale": str(scale), "loss_scale_window": "2"},
        use_distributed_optimizer=shared,
    )
    learner = make_learner(fp16=True, megatron=megatron)
    for seed in range(3):
        learner.train(make_batch(seed=seed))
    learner.save(tmp_path)
    unbroken = [learner.train(make_batch(seed=seed)) for seed in (3, 4, 5)]
    wanted = weights_of(learner)
    assert len({metrics["train/loss_scale"] for metrics in unbroken} - {scale}) > 1  # it has moved, and moves

    learner = make_learner(fp16=True, megatron=megatron)
    learner.load(tmp_path)
    resumed = [learner.train(make_batch(seed=seed)) for seed in (3, 4, 5)]
    for one, other in zip(unbroken, resumed, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/loss_scale"):
            assert one.get(name) == other.get(name)
    assert all(map(torch.equal, wanted, weights_of(learner)))
    learner = make_learner()
    with pytest.raises(CheckpointError, match="fp16 is True, this trainer's is False"):
        learner.load(tmp_path)
