"""Small updates of weights, and sending them."""

from __future__ import annotations

import asyncio

import torch
from slime_core.protocols import TransferPlan
from slime_models.transfer.fingerprint import fingerprint

SHAPES = {"a": (3, 5), "b": (0, 4), "c": (130,)}


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


async def buckets(values):
    for name, tensor in values.items():
        yield [(name, tensor)], {name: fingerprint(tensor)}


def send(sender, plan, values):
    return asyncio.run(sender.send(plan, buckets(values)))


def plan_of(transport, channel, version="7", **senders):
    return TransferPlan(transport=transport, version=version, dtype="float32", channel=channel, **senders)


def begun(receiver, plan, n_ranks):
    """An update of a transport by ranks, whose sender is there, for so many ranks."""
    update = asyncio.run(receiver.arrive(plan))
    update.begin(n_ranks)
    return update
