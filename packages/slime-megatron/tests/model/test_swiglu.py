"""SwiGLU against its formula in double precision, and what it keeps; Megatron's MLPs with it against Megatron's own."""

from __future__ import annotations

import pytest
import torch

from ..comparison import near


@pytest.fixture
def swiglu():
    from slime_megatron.model.layers.swiglu import swiglu

    return swiglu


@pytest.mark.parametrize("with_gates", [False, True])
def test_value_and_gradients_are_those_of_the_formula(swiglu, with_gates):
    mixed = torch.randn(9, 24, requires_grad=True)
    gates = torch.rand(9, requires_grad=True) if with_gates else None
    gradient = torch.randn(9, 12)
    value = swiglu(mixed, gates)
    found = torch.autograd.grad(value, [each for each in (mixed, gates) if each is not None], gradient)
    exact = mixed.detach().double().requires_grad_()
    exact_gates = torch.ones(9).double() if gates is None else gates.detach().double()
    exact_gates.requires_grad_(with_gates)
    gate, up = exact.chunk(2, dim=-1)
    wanted = gate / (1 + (-gate).exp()) * up * exact_gates[:, None]
    of_wanted = torch.autograd.grad(wanted, [exact, exact_gates][: 1 + with_gates], gradient.double())
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, of_wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)


def test_it_keeps_its_input_alone(swiglu):
    kept = []
    mixed = torch.randn(10, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t
    ):
        assert swiglu(mixed).dtype == torch.bfloat16
    assert kept == [10 * 64 * 2]


@pytest.mark.parametrize("model", ["qwen3", "qwen2_moe"])
def test_megatrons_own_mlp_or_shared_experts_give_the_same(make_learner, cut_models, monkeypatch, model):
    from megatron.core.transformer.mlp import MLP
    from slime_megatron.model.layers.swiglu import SwiGLUMLP, SwiGLUSharedExperts

    mlp = make_learner(folder=cut_models[model], bf16=False).model.decoder.layers[-1].mlp
    module = mlp if model == "qwen3" else mlp.shared_experts
    assert type(module) is (SwiGLUMLP if model == "qwen3" else SwiGLUSharedExperts)
    device = next(module.parameters()).device
    rows = torch.randn(11, 1, module.config.hidden_size, device=device, requires_grad=True)
    leaves = [rows, *module.parameters()]

    def output_and_gradients():
        output = module(rows)
        output = output[0] if isinstance(output, tuple) else output
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    found = output_and_gradients()
    monkeypatch.setattr(SwiGLUMLP, "forward", MLP.forward)
    for mine, own in zip(found, output_and_gradients(), strict=True):
        torch.testing.assert_close(mine, own, rtol=near(1e-5), atol=near(1e-6))


def test_another_activation_is_left_to_megatron(make_learner, cut_models, monkeypatch):
    mlp = make_learner(folder=cut_models["qwen3"], bf16=False).model.decoder.layers[0].mlp
    rows = torch.randn(3, 1, mlp.config.hidden_size, device=next(mlp.parameters()).device)
    plain = mlp(rows)[0]
    monkeypatch.setattr(mlp.config, "activation_func_clamp_value", 1e-3)
    assert mlp(rows)[0].abs().max() < 0.1 * plain.abs().max()
    monkeypatch.setattr(mlp.config, "activation_func_clamp_value", None)
    monkeypatch.setattr(mlp.config, "activation_func", torch.nn.functional.gelu)
    assert not torch.allclose(mlp(rows)[0], plain)
