"""Grouped experts against a plain loop over experts, Megatron's own experts, and what they launch on the device cuda."""

from __future__ import annotations

import pytest
import torch
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device, on_cuda

from ..comparison import near

COUNTS = (3, 0, 5, 1)


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def looped(rows, weights, gradient):
    """Return products and gradients of rows and weights, row by row in float64."""
    experts = [expert for expert, n in enumerate(COUNTS) for _ in range(n)]
    rows, weights, gradient = rows.double(), weights.double(), gradient.double()
    output = torch.stack([weights[e] @ row for e, row in zip(experts, rows, strict=True)])
    of_rows = torch.stack([weights[e].t() @ g for e, g in zip(experts, gradient, strict=True)])
    of_weights = torch.zeros_like(weights)
    for e, g, row in zip(experts, gradient, rows, strict=True):
        of_weights[e] += torch.outer(g, row)
    return output, of_rows, of_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [(16, 24), (6, 10)], ids=["aligned", "not aligned"])
def test_products_and_gradients_are_those_of_a_loop_over_rows(width, dtype):
    """Also those that CUDA computes, by torch's kernels for a CPU. A group has no rows."""
    from slime_megatron.model.layers import experts

    n_in, n_out = width
    rows, weights = drawn(9, n_in, seed=1, dtype=dtype), drawn(4, n_out, n_in, seed=2, dtype=dtype)
    gradient, ends = drawn(9, n_out, seed=3, dtype=dtype), torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    wanted = looped(rows, weights, gradient)
    rows.requires_grad_()
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    output = experts.grouped_product(rows, parameters, ends)
    output.backward(gradient)
    on_one = output, rows.grad, torch.stack([parameter.grad for parameter in parameters])
    on_cuda = (
        experts._by_stack(rows.detach(), weights.transpose(1, 2), ends),
        experts._by_stack(gradient, weights, ends),
        experts._stack_of_gradients(gradient, rows.detach(), ends),
    )
    bound = 1e-6 if dtype is torch.float32 else 2**-8
    for found in (on_one, on_cuda):
        for mine, exact in zip(found, wanted, strict=True):
            assert mine.dtype is dtype and mine.shape == exact.shape
            assert (mine.double() - exact).abs().max() <= bound * exact.abs().max()
        assert found[2][1].eq(0).all()


@pytest.fixture
def grouped(make_learner, cut_models):
    """Return a function that returns the experts of a model's first layer."""

    def make(*, adapters=False, flags=None, bf16=False):
        section = MegatronSection(
            recompute_granularity="selective" if flags else None, megatron_args=flags or {}
        )
        lora = LoraSection(rank=4, alpha=6.0) if adapters else LoraSection()
        learner = make_learner(
            folder=cut_models["qwen3_moe"], megatron=section, bf16=bf16, settings={"lora": lora}
        )
        return learner.model.decoder.layers[0].mlp.experts

    return make


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("flags", [{}, {"recompute_modules": ["moe_act"]}], ids=["kept", "recomputed"])
def test_outputs_and_gradients_are_those_of_megatrons_own_experts(grouped, adapters, flags):
    from megatron.core.transformer.moe.experts import SequentialMLP
    from slime_megatron.model.layers.experts import GroupedExperts

    own = grouped(adapters=adapters, flags=flags)
    assert type(own) is GroupedExperts
    for i, (name, parameter) in enumerate(own.named_parameters()):
        if name.endswith("lora_b"):
            parameter.data.copy_(drawn(*parameter.shape, seed=i))
    trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
    assert len(trained) == own.num_local_experts * (4 if adapters else 2)
    device = trained[0].device
    rows, gates, gradient = drawn(9, 64, seed=5), drawn(9, seed=6).sigmoid(), drawn(9, 64, seed=7).to(device)
    counts = torch.tensor([*COUNTS, *[0] * (own.num_local_experts - len(COUNTS))], device=device)
    found = []
    for forward in (GroupedExperts.forward, SequentialMLP.forward):
        given = [tensor.to(device, copy=True).requires_grad_() for tensor in (rows, gates)]
        for parameter in trained:
            parameter.main_grad.zero_()
        output, bias = forward(own, given[0], counts, given[1])
        output.backward(gradient)
        assert bias is None
        found.append([output, *(x.grad for x in given), *(x.main_grad.clone() for x in trained)])
    assert all(tensor.abs().max() > 0 for tensor in found[0][:3])
    for mine, wanted in zip(*found, strict=True):
        assert torch.allclose(mine, wanted, rtol=near(1e-5), atol=near(1e-6))


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_a_layers_experts_launch_so_much_on_the_device_and_wait_for_nothing(grouped, adapters):
    """The number of launches does not grow with that of experts: one product, one stack of matrices."""
    own = grouped(adapters=adapters, bf16=True)
    with cuda_without_device() as counted, torch.no_grad():
        held = {
            name: on_cuda(tensor)
            for name, tensor in own.state_dict(keep_vars=True).items()
            if tensor is not None
        }
        rows, gates = torch.empty(9, 64, dtype=torch.bfloat16, device=CUDA), torch.empty(9, device=CUDA)
        counts = torch.empty(own.num_local_experts, dtype=torch.int64)
        output, _ = torch.func.functional_call(own, held, (rows, counts, gates))
    assert output.is_cuda and output.dtype is torch.bfloat16 and output.shape == rows.shape
    assert not counted.waits
    assert counted.operations.count("_grouped_mm") == (6 if adapters else 2)
    assert len(counted.operations) <= (30 if adapters else 10)


def test_sizes_on_a_cpu_are_few_and_at_most_an_eighth_more():
    from slime_megatron.model.layers.local_experts import whole_sizes

    counts = torch.arange(5000)
    sizes = whole_sizes(counts)
    assert sizes[:17].equal(counts[:17]) and sizes[[17, 33, 1000]].tolist() == [18, 36, 1024]
    assert (sizes >= counts).all() and (8 * (sizes - counts) <= counts).all()
    assert len(sizes.unique()) <= 8 * 13


@pytest.mark.parametrize("n_tokens", [1, 40])
def test_the_way_to_local_experts_and_back_is_that_of_megatrons_dispatcher(
    make_learner, cut_models, n_tokens
):
    """Outputs and gradients, of the router too; 40 tokens of which several experts get more than 16."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from slime_megatron.model.layers.local_experts import LocalDispatcher

    layer = make_learner(folder=cut_models["qwen3_moe"]).model.decoder.layers[0].mlp
    assert type(layer.token_dispatcher) is LocalDispatcher
    device = layer.router.weight.device
    tokens, gradient = (drawn(n_tokens, 1, 64, seed=seed).to(device) for seed in (1, 2))
    theirs = MoEAlltoAllTokenDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=layer.config,
        pg_collection=get_default_pg_collection(),
    )
    found = []
    for dispatcher in (layer.token_dispatcher, theirs):
        layer.token_dispatcher, given = dispatcher, tokens.clone().requires_grad_()
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
        output, bias = layer(given)
        output.backward(gradient)
        assert bias is None
        found.append([output, given.grad, *(each.main_grad.clone() for each in layer.parameters())])
    for mine, wanted in zip(*found, strict=True):
        assert (mine - wanted).abs().max() <= near(1e-6) * wanted.abs().max().clamp(min=1)
