"""Checkpoints of an optimizer that counts its steps in groups of parameters, as TransformerEngine's FusedAdam does.

TransformerEngine needs CUDA to be built, so `FusedAdam` stands in for it here. It follows what
`transformer_engine.pytorch.optimizers.FusedAdam` of version 2 says of itself: the states of a parameter are `exp_avg`,
`exp_avg_sq` and `master_param`; `state_dict` and `load_state_dict` look the dtype of each up by its name; the number of steps is
`step` of a group, a whole number that is given to the kernel, and a group without parameters has none.
"""

from __future__ import annotations

import pytest
import torch
from slime_megatron.settings.section import MegatronSection

from ..batches import make_batch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the states of TransformerEngine's."""

    name_to_dtype_map = dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), torch.float32)

    def __init__(self, params, *, lr, weight_decay, betas, eps, adam_w_mode, capturable):
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            if type(group["step"]) is not int:
                raise TypeError(f"multi_tensor_adam: step is {group['step']!r}, not an int")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter, group):
        state, (first, second) = self.state[parameter], group["betas"]
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(parameter))
        state["exp_avg"].lerp_(parameter.grad, 1 - first)
        state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        mean = state["exp_avg"] / (1 - first ** group["step"])
        root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
        parameter.sub_(group["lr"] * mean / (root + group["eps"]))

    def state_dict(self):
        found = super().state_dict()
        for number, state in found["state"].items():
            found["state"][number] = {
                name: value.to(self.name_to_dtype_map[name]) for name, value in state.items()
            }
        return found

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = {
                name: value.clone().to(self.name_to_dtype_map[name]) for name, value in state.items()
            }


@pytest.fixture
def fused_adam(monkeypatch):
    """Return a function that lets Megatron find it, as where TransformerEngine is installed, or not."""

    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    def install(installed):
        monkeypatch.undo()
        if installed:
            for module in (megatron_optimizer, distrib_optimizer):
                monkeypatch.setattr(module, "Adam", FusedAdam)
            monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
            monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
            monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)

    return install


@pytest.fixture
def make(make_learner):
    def make(*, shares, bf16=True):
        megatron = MegatronSection(use_distributed_optimizer=shares)
        return make_learner(bf16=bf16, lr=1e-2, weight_decay=0.1, megatron=megatron)

    return make


def inner_of(learner):
    (each,) = learner._policy.optimizer.chained_optimizers
    return each.optimizer


def state_of(learner):
    """Return weights, master weights and moments."""
    inner = inner_of(learner)
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    moments = [inner.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in (*learner.model.parameters(), *parameters, *moments)]


def steps_of(learner):
    """Return the numbers of steps of all parameters, wherever they are."""
    inner = inner_of(learner)
    if isinstance(inner, FusedAdam):
        return {group["step"] for group in inner.param_groups}
    return {int(state["step"]) for state in inner.state.values()}


def same(found, wanted):
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("shares", "bf16"), [(True, True), (False, True), (False, False)])
def test_going_on_equals_never_having_stopped(make, fused_adam, tmp_path, shares, bf16):
    fused_adam(True)
    learner = make(shares=shares, bf16=bf16)
    assert isinstance(inner_of(learner), FusedAdam)
    for seed in range(2):
        learner.train(make_batch(seed=seed))
    learner.save(tmp_path)
    saved = state_of(learner)
    learner.train(make_batch(seed=2))
    wanted = state_of(learner)
    assert not same(saved, wanted)

    learner = make(shares=shares, bf16=bf16)
    learner.train(make_batch(seed=9))  # loading must undo this
    learner.load(tmp_path)
    assert same(state_of(learner), saved)
    learner.train(make_batch(seed=2))
    assert same(state_of(learner), wanted)
    assert steps_of(learner) == {3}


@pytest.mark.parametrize("shares", [True, False])
def test_a_checkpoint_from_before_the_first_step_goes_on_as_the_first(make, fused_adam, tmp_path, shares):
    fused_adam(True)
    learner = make(shares=shares)
    learner.save(tmp_path)
    learner.train(make_batch())
    wanted = state_of(learner)
    learner = make(shares=shares)
    learner.load(tmp_path)
    learner.train(make_batch())
    assert same(state_of(learner), wanted)
    assert steps_of(learner) == {1}


@pytest.mark.parametrize("to_fused", [True, False])
@pytest.mark.parametrize(("before", "after"), [(True, True), (False, False), (True, False), (False, True)])
def test_the_number_of_steps_goes_where_the_other_optimizer_has_it(
    make, fused_adam, tmp_path, to_fused, before, after
):
    """Between machines with and without TransformerEngine, also where ranks begin or cease to share the state."""
    fused_adam(not to_fused)
    learner = make(shares=before)
    for seed in range(2):
        learner.train(make_batch(seed=seed))
    learner.save(tmp_path)
    saved = state_of(learner)

    fused_adam(to_fused)
    learner = make(shares=after)
    learner.load(tmp_path)
    assert isinstance(inner_of(learner), FusedAdam) == to_fused
    assert steps_of(learner) == {2}
    found = state_of(learner)
    n_weights = len(list(learner.model.parameters()))
    assert same(found[:n_weights], saved[:n_weights])
    assert sum(float(each.double().square().sum()) for each in found) == pytest.approx(
        sum(float(each.double().square().sum()) for each in saved), rel=1e-12
    )
    assert learner.train(make_batch(seed=2))["train/skipped_steps"] == 0
    assert steps_of(learner) == {3}
