"""`WeightSender` where the engine serves quantised weights."""

from __future__ import annotations

import asyncio

import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import TransferPlan
from slime_core.weights.sync import MemoryChannel
from slime_models.quantization.blocks import quantize_fp8
from slime_models.quantization.config import FORMATS, Kept
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.sender import WeightSender

from ..quantization.matrices import bits, weights


def test_a_sender_quantises_what_the_plan_says_and_fingerprints_what_it_sends():
    name, channel = "model.layers.0.mlp.up_proj.weight", MemoryChannel()
    values = {name: weights(16, 16), "model.norm.weight": weights(16, 1)[:, 0]}
    plan = TransferPlan(
        transport="memory",
        version="1",
        dtype="bfloat16",
        channel=channel,
        quantization=FORMATS["fp8-block"](Kept(), 8),
    )

    async def buckets():
        yield list(values.items()), {name: fingerprint(tensor) for name, tensor in values.items()}

    async def scenario():
        sending = asyncio.ensure_future(WeightSender(asyncio.to_thread, Registry()).send(plan, buckets()))
        arrived = [pair async for bucket in channel.buckets() for pair in bucket]
        return await sending, dict(arrived)

    said, arrived = asyncio.run(scenario())
    codes, scales = quantize_fp8(values[name], rows=128, columns=128)
    assert list(arrived) == [name, name + "_scale_inv", "model.norm.weight"]
    assert torch.equal(bits(arrived[name]), bits(codes))
    assert torch.equal(arrived[name + "_scale_inv"], scales)
    assert said == {name: fingerprint(tensor) for name, tensor in arrived.items()}
