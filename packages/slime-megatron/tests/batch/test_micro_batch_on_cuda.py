"""Making micro-batches for the device cuda, whose tensors have no data: needs no GPU, and computes nothing there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device

from ..batches import make_batch
from ..layouts import with_shared_prompts


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a dataclass and of what it holds, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each, name)


@pytest.mark.parametrize("kind", ["dense", "experts", "sampling mask", "all"])
def test_all_of_it_is_on_the_device_and_nothing_waits(kind):
    from slime_megatron.batch.micro_batch import BatchOnDevice, make_micro_batch
    from slime_megatron.batch.routing import StepRouting
    from slime_megatron.batch.sampling_mask import SamplingMask
    from slime_megatron.batch.token_columns import TokenColumns
    from slime_megatron.batch.trees.sharing import token_trees
    from slime_megatron.parallel.token_split import TokenSplit

    batch = dataclasses.replace(with_shared_prompts(), extra={"train_metadata": [{"i": i} for i in range(7)]})
    n = int(batch.response_offsets[-1])
    ids = torch.arange(2 * n)
    mask = SamplingMask(ids, np.arange(0, 2 * n + 1, 2)) if kind in ("sampling mask", "all") else None
    routing = StepRouting.of(batch, np.arange(7)) if kind in ("experts", "all") else None
    with cuda_without_device() as counted:
        rotary = torch.empty(64, 8, device=CUDA), torch.empty(64, 8, device=CUDA)
        source = BatchOnDevice(
            batch=batch, rotary=rotary, vocab_size=250, split=TokenSplit(), sampling_mask=mask
        )
        columns = TokenColumns.of(batch, CUDA)
        before = len(counted.operations)
        trees = token_trees(batch, range(7), max_tokens=1000, share=True)
        micro = make_micro_batch(source, trees, routing=routing, mtp_routing=(routing,) if routing else ())
        launched = counted.operations[before:]
        view = columns.view(micro, torch.empty(n, device=CUDA))
    assert not counted.waits
    found = dict(tensors(micro))
    assert len(found) >= 12
    assert {
        name for name, tensor in found.items() if tensor.device != CUDA.type and not tensor.is_cuda
    } == set()
    assert all(tensor.is_cuda for _, tensor in tensors(view))
    assert view.train_metadata == [{"i": i} for i in micro.members]
    # One copy for each tensor, cosine and sine looked up: nothing else is launched.
    assert sorted(set(launched)) == ["_to_copy", "index"]
    rows = 1 + len(micro.responses.mtp_rows)
    assert launched.count("index") == 2 * rows
    assert launched.count("_to_copy") == {"dense": 11, "experts": 28, "sampling mask": 12, "all": 29}[kind]


def test_a_batch_that_needs_no_padding_has_no_map():
    """Two samples of one length: attention reads the row as it is."""
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.token_tree import TokenTree

    with cuda_without_device() as counted:
        rotary = torch.empty(64, 8, device=CUDA), torch.empty(64, 8, device=CUDA)
        packed = pack([TokenTree.of_prompt(9, ()), TokenTree.of_prompt(4, (5,))], rotary)
    assert (packed.padding_map, counted.waits) == (None, [])


def test_columns_of_a_batch_are_on_the_device_and_nothing_waits():
    from slime_megatron.batch.token_columns import TokenColumns

    batch = make_batch()
    with cuda_without_device() as counted:
        view = TokenColumns.of(batch, CUDA).whole(batch)
    assert not counted.waits
    found = dict(tensors(view))
    assert len(found) == 7 and all(tensor.is_cuda for tensor in found.values())
