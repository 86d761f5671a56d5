"""When later updates are copied to their places without SGLang's `load_weights`, and when not."""

from __future__ import annotations

import pytest
import torch
from slime_models.transfer.fingerprint import fingerprints_of
from slime_sglang.inside.held_weights import HeldWeights
from slime_sglang.inside.loader import fingerprints_held
from slime_sglang.weights.protocol import LoaderRequest
from torch.nn import Parameter

Q, K, V = (f"layers.{part}_proj.weight" for part in "qkv")
TABLE = "model.embed_tokens.weight"


class Model(torch.nn.Module):
    """A stacked matrix, and a table that is padded with zeros, of one rank of some; loaded as SGLang does it."""

    def __init__(self, rank=0, n_ranks=1, dtype=torch.bfloat16):
        super().__init__()
        self.calls, self.rank, self.n_ranks = 0, rank, n_ranks
        self.layers, self.model = torch.nn.Module(), torch.nn.Module()
        self.layers.qkv_proj, self.model.embed_tokens = torch.nn.Module(), torch.nn.Module()
        self.layers.qkv_proj.weight = Parameter(torch.randn(12 // n_ranks, 3).to(dtype))
        self.model.embed_tokens.weight = Parameter(torch.randn(8 // n_ranks, 3).to(dtype))

    def load_weights(self, tensors):
        self.calls += 1
        for name, tensor in tensors:
            self.load(name, tensor)

    def load(self, name, tensor):
        if name == TABLE:
            table = self.model.embed_tokens.weight
            mine = tensor[self.rank * len(table) : (self.rank + 1) * len(table)]
            table[: len(mine)].data.copy_(mine)
            table[len(mine) :].data.fill_(0)
            return
        stack = self.layers.qkv_proj.weight.data
        rows = 4 // self.n_ranks
        first = (Q, K, V).index(name) * rows
        stack.narrow(0, first, rows).copy_(tensor.narrow(0, self.rank * rows, rows))


class Deriving(Model):
    """Makes a matrix of what it has loaded, as latent attention does."""

    def load_weights(self, tensors):
        super().load_weights(tensors)
        self.derived = self.layers.qkv_proj.weight * 2


class Doubling(Model):
    """Keeps a copy of a table elsewhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("output", torch.zeros(7, 3, dtype=torch.bfloat16))

    def load(self, name, tensor):
        super().load(name, tensor)
        if name == TABLE:
            self.output.copy_(tensor)


def update(seed):
    torch.manual_seed(seed)
    shapes = {Q: (4, 3), K: (4, 3), V: (4, 3), TABLE: (7, 3)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def load(model, tensors, request, *, in_parts=1, ends=True):
    """Load an update as the loaders do; returns whether each place holds what was sent."""
    weights = HeldWeights(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, request)
    pairs = list(tensors.items())
    for part in range(in_parts):
        weights.load(pairs[part::in_parts])
    held = {
        name: tensor.to(torch.bfloat16).equal(tensors[name][index])
        for name, (tensor, index) in weights.places.items()
    }
    assert held.keys() == tensors.keys()
    if ends:
        weights.end()
    return all(held.values())


REQUEST = LoaderRequest(folder="", answer="")


@pytest.mark.parametrize("in_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "n_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_after_an_update_of_plain_copies_the_next_one_goes_to_the_same_places(in_parts, dtype, rank, n_ranks):
    model = Model(rank, n_ranks, dtype)
    request = LoaderRequest(folder="", answer="", rank=rank, n_ranks=n_ranks)
    for seed in range(3):
        assert load(model, update(seed), request, in_parts=in_parts)
        assert model.calls == in_parts
    padded = model.model.embed_tokens.weight[3 if rank else 4 if n_ranks > 1 else 7 :]
    assert len(padded) == (n_ranks == 1 or rank)
    assert not padded.any()


@pytest.mark.parametrize("kind", [Deriving, Doubling])
def test_a_model_that_makes_more_of_its_weights_is_loaded_by_sglang_each_time(kind):
    model = kind()
    for seed in range(3):
        assert load(model, update(seed), REQUEST)
    assert model.calls == 3


def test_an_update_that_did_not_end_proves_nothing():
    model = Model()
    assert load(model, update(0), REQUEST, ends=False)
    assert load(model, update(1), REQUEST)
    assert model.calls == 2
    assert load(model, update(2), REQUEST)
    assert model.calls == 2


def test_an_update_of_other_tensors_is_loaded_by_sglang():
    model = Model()
    for seed in range(2):
        assert load(model, update(seed), REQUEST)
    assert model.calls == 1
    assert load(model, update(2) | {TABLE: torch.randn(8, 3).bfloat16()}, REQUEST)
    assert model.calls == 2


def test_parameters_that_were_replaced_get_the_next_update():
    model = Model()
    assert load(model, update(0), REQUEST)
    model.layers.qkv_proj.weight = Parameter(torch.zeros(12, 3, dtype=torch.bfloat16))
    assert load(model, update(1), REQUEST)
    assert model.calls == 1
    assert model.layers.qkv_proj.weight[4:8].equal(update(1)[K])


def test_what_the_parameters_hold_is_looked_at_however_it_got_there():
    model, tensors = Model(), update(0)
    assert load(model, tensors, REQUEST)
    weights = HeldWeights(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, REQUEST)
    assert weights.is_direct
    new = update(1)
    weights.load(new.items())
    model.layers.qkv_proj.weight.data[5, 1] += 1
    entries = {name: _Entry(tensor) for name, tensor in new.items()}
    found = fingerprints_held(weights.places, entries, new.__getitem__)
    wanted = fingerprints_of(new.items())
    assert {name for name in wanted if found[name] != wanted[name]} == {K}


class _Entry:
    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), "bfloat16"
        self.fingerprint = fingerprints_of([("", tensor)])[""]
