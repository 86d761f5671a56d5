"""The decoder over tensors of the device cuda that have no data: needs no GPU, and computes nothing.

A tensor on another device, or a value that the host asks for, is an error there.
"""

from __future__ import annotations

import pytest
import torch
from slime_torch.model.decoder import Decoder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..conftest import CONFIGS, FAMILIES, VOCAB

CUDA = torch.device("cuda")


class Attention(TorchFunctionMode):
    """Takes down whether cuDNN, which plans for each shape, may compute each attention."""

    def __init__(self):
        super().__init__()
        self.may_plan = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.may_plan.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations that run a kernel: not those that only look at a tensor in another way."""

    VIEWS = ("view", "as_strided", "slice", "select", "split", "split_with_sizes", "transpose", "unsqueeze", "squeeze", "expand",
             "t", "detach", "alias", "unbind", "permute", "empty", "_unsafe_view", "reshape", "_reshape_alias")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in self.VIEWS and not name.startswith("prim::"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def decoder(kind):
    family = FAMILIES[kind.partition("-")[0]]
    architecture = family.architecture(CONFIGS[kind]().to_dict())
    shapes = family.hf_shapes(architecture)
    return Decoder(architecture, shapes=shapes, max_length=64, dtype=torch.bfloat16, device=CUDA)


@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_and_decoding_stay_on_the_device(kind):
    with FakeTensorMode(), Attention() as attention:
        model = decoder(kind)
        cache = model.create_cache(8)
        cache.reserve(3, 20)
        prefilled = model.prefill([[1] * 7, [2] * 7, [3] * 4], [0, 1, 2], cache)
        before = len(attention.may_plan)
        hidden = model.decode(
            torch.zeros(3, dtype=torch.int64, device=CUDA),
            torch.ones(3, dtype=torch.int64, device=CUDA),
            cache,
        )
        logits = model.logits(hidden)
    n_layers = model.architecture.num_layers
    assert (prefilled.device.type, prefilled.shape) == ("cuda", (3, 64))
    assert (logits.device.type, logits.dtype, logits.shape) == ("cuda", torch.bfloat16, (3, VOCAB))
    assert (before, len(attention.may_plan)) == (2 * n_layers, 3 * n_layers)  # two lengths; one step
    assert not any(attention.may_plan)


def operations(n_layers):
    config = CONFIGS["llama"]()
    config.num_hidden_layers = n_layers
    family = FAMILIES["llama"]
    architecture = family.architecture(config.to_dict())
    with FakeTensorMode():
        model = Decoder(
            architecture,
            shapes=family.hf_shapes(architecture),
            max_length=64,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        cache = model.create_cache(8)
        cache.reserve(3, 20)
        tokens, lengths = (torch.zeros(3, dtype=torch.int64, device=CUDA) for _ in range(2))
        with Operations() as counted:
            model.decode(tokens, lengths, cache)
    return counted.names


def test_operations_of_a_decode_step():
    """Each is a launch on CUDA, which takes microseconds of the host. Attention counts as the plain operations that stand in for it."""
    two, four = operations(2), operations(4)
    of_a_layer = (len(four) - len(two)) / 2
    assert of_a_layer <= 26
    assert len(two) - 2 * of_a_layer <= 19
