"""The model's forward pass over a micro-batch of the device cuda, whose tensors have no data: needs no GPU, and computes nothing.

Operations are those without gradient: with it there are more, and torch's autograd wants a real device for its backward pass.
Experts are those of one rank: Megatron's dispatchers for several ask the device how many tokens each gets.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from slime_megatron.settings.section import MegatronSection
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device, on_cuda

from ..batches import make_batch

LENGTHS = ((5, 9), (11, 3), (4, 10), (7, 7))  # of one length: attention is called once a layer


def micro_batch(architecture, routing=None):
    """Return a micro-batch of whole sequences on the device."""
    from slime_megatron.batch.micro_batch import BatchOnDevice, make_micro_batch
    from slime_megatron.batch.rope import rotary_tables
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.parallel.token_split import TokenSplit

    rotary = tuple(on_cuda(table) for table in rotary_tables(architecture, 32, dtype=torch.bfloat16))
    batch = make_batch(lengths=LENGTHS)
    source = BatchOnDevice(
        batch=batch,
        rotary=rotary,
        vocab_size=architecture.vocab_size,
        split=TokenSplit(),
        needs={"entropy"},
    )
    return make_micro_batch(
        source, [TokenTree.of_sample(batch, i) for i in range(len(LENGTHS))], routing=routing
    )


def operations_of(learner):
    """Return what is launched for a micro-batch, log-probs and entropies included; nothing may wait."""
    from slime_megatron.model.gpt import response_log_probs

    model = learner.model
    with cuda_without_device() as counted, torch.no_grad():
        held = {
            name: on_cuda(tensor)
            for name, tensor in model.state_dict(keep_vars=True).items()
            if tensor is not None
        }
        micro = micro_batch(learner._architecture)
        counted.waits.clear()
        before = len(counted.operations)
        found = torch.func.functional_call(
            model,
            held,
            kwargs={
                "input_ids": micro.tokens,
                "position_ids": None,
                "attention_mask": None,
                "packed_seq_params": micro.packed,
                "output_processor": partial(response_log_probs, chunk_tokens=4096),
                "output_processor_context": micro.responses,
            },
        )
    assert found.numbers.is_cuda and found.numbers.shape == (2, 29) and found.logits is None
    assert not counted.waits
    return counted.operations[before:]


def test_a_micro_batch_waits_for_nothing_and_a_layer_launches_so_much(make_learner, make_hf):
    """Attention is one operation, or, where torch has none for tensors without data, the 18 plain ones that stand in for it."""
    found = {}
    for n_layers in (1, 3):
        _, folder = make_hf("qwen3", head_dim=32, num_hidden_layers=n_layers, dtype=torch.bfloat16)
        found[n_layers] = operations_of(make_learner(folder=folder, bf16=True))
    of_a_layer = (len(found[3]) - len(found[1])) / 2
    attention = 1 if any("varlen_attn" in str(operation) for operation in found[1]) else 18
    assert of_a_layer - attention <= 15
    assert len(found[1]) - of_a_layer <= 13


def test_a_micro_batch_of_experts_that_one_rank_has_waits_for_nothing(make_learner, cut_models):
    found = operations_of(make_learner(folder=cut_models["qwen3_moe"], bf16=True))
    assert found.count("_grouped_mm") == 2 * found.count("nonzero_static") > 0


@pytest.mark.parametrize("action", [None, "record", "replay"])
def test_a_router_with_all_losses_stays_on_the_device_and_waits_for_nothing(make_learner, cut_models, action):
    from slime_megatron.batch.routing import StepRouting
    from slime_megatron.model.layers.router import RECORD, REPLAY, replay

    flags = {
        "moe_z_loss_coeff": "1e-3",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": "1e-2",
    }
    section = MegatronSection(megatron_args=flags, use_routing_replay=True)
    learner = make_learner(folder=cut_models["qwen3_moe"], megatron=section, bf16=True)
    router = learner._policy.routers[0]
    with cuda_without_device() as counted:
        routing = StepRouting.of(make_batch(lengths=LENGTHS), np.arange(len(LENGTHS)))
        micro = micro_batch(learner._architecture, routing)
        tokens = micro.packed.routed
        router.tokens = tokens
        tokens.routes[1] = torch.empty(len(tokens.segment), 2, dtype=torch.int16)
        weights = {name: on_cuda(tensor) for name, tensor in router.state_dict(keep_vars=True).items()}
        hidden = torch.empty(len(tokens.segment), 1, 64, dtype=torch.bfloat16, device=CUDA)
        with replay([router], {"record": RECORD, "replay": REPLAY}.get(action)):
            probabilities, routes = torch.func.functional_call(router, weights, (hidden,))
    router.losses = {}
    assert probabilities.is_cuda and routes.is_cuda and routes.dtype is torch.bool
    assert not tokens.routes[1].is_cuda and tokens.routes[1].dtype is torch.int16
    assert not counted.waits
