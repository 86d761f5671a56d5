"""What a rank does with an update that it receives itself, without a server: a sender, and a model that is loaded as SGLang's are."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import TransferPlan
from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint, fingerprints_of
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transports.nccl import TRANSPORT
from slime_sglang.inside.receiving_loader import receive
from slime_sglang.weights.description import write_description
from slime_sglang.weights.protocol import LoaderRequest, read_result

A, B = "layers.0.q_proj.weight", "layers.0.o_proj.weight"
LATENT = [f"layers.0.{leaf}.weight" for leaf in ("q_a_proj", "kv_a_proj_with_mqa")]


class Model(torch.nn.Module):
    """Parameters by dotted names, and which of them each call of `load_weights` brought."""

    def __init__(self, shapes):
        super().__init__()
        self.calls, self.spoiled = [], None
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            parent = self
            for part in module.split("."):
                if part not in dict(parent.named_children()):
                    parent.add_module(part, torch.nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))

    def load_weights(self, tensors):
        self.calls.append([])
        for name, tensor in tensors:
            self.calls[-1].append(name)
            self.get_parameter(name).data.copy_(tensor + (name == self.spoiled))


def run(tmp_path, model, specs, buckets, *, version="7", sent_as="7"):
    """Send buckets of (name, tensor) to a rank; returns what the sender returns or raises, and what the rank said."""
    storage = UpdateStorage(
        specs={name: Spec(shape=shape, dtype="float32") for name, shape in specs.items()},
        model_path=tmp_path, staging_dir=tmp_path, disk_dir=tmp_path / "disk", keep_files=False, encoding="xor",
        timeout_s=20, has_ranks=True,
    )  # fmt: skip
    receiver = TRANSPORT.create_receiver(storage)
    channel = receiver.open(version)
    plans = [
        TransferPlan(transport="nccl", version=each, dtype="float32", channel=channel)
        for each in (sent_as, version)
    ]

    async def told():
        for bucket in buckets:
            yield bucket, fingerprints_of(bucket)

    async def load():
        update = await receiver.arrive(plans[1])
        update.begin(1)
        description, answer = tmp_path / f"update-{version}", tmp_path / f"answer-{version}"
        write_description(update, description)
        assert description.stat().st_mode & 0o077 == 0
        request = LoaderRequest(folder=str(description), answer=str(answer), group_rank=update.take_ranks(1))
        await asyncio.to_thread(receive, model, [(request.text(), torch.empty(0))])
        return read_result(answer)

    async def both():
        sender = WeightSender(asyncio.to_thread, Registry())
        return await asyncio.gather(sender.send(plans[0], told()), load(), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(both(), 60))


@pytest.fixture
def model():
    return Model({A: (4, 4), B: (4, 4)})


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {name: torch.randn(4, 4) for name in (A, B)}


SPECS = {A: (4, 4), B: (4, 4)}


def test_each_bucket_is_loaded_by_itself_and_what_is_held_is_said(tmp_path, model, tensors):
    wanted = fingerprints_of(tensors.items())
    for version in ("7", "8"):
        buckets = [[(name, tensor)] for name, tensor in tensors.items()]
        sent, result = run(tmp_path, model, SPECS, buckets, version=version, sent_as=version)
        assert sent == wanted
        assert (result.error, result.sent, result.held) == (None, wanted, wanted)
        assert model.get_parameter(B).equal(tensors[B])
    assert model.calls == [[A], [B], [A], [B]]


@pytest.mark.parametrize("order", [LATENT, LATENT[::-1]])
def test_matrices_that_sglang_joins_come_in_one_call(tmp_path, order):
    shapes = dict.fromkeys((A, *LATENT, B), (4, 4))
    tensors = {name: torch.randn(4, 4) for name in shapes}
    model = Model(shapes)
    buckets = [[(name, tensors[name]) for name in part] for part in ((A, order[0]), (order[1], B))]
    sent, result = run(tmp_path, model, shapes, buckets)
    assert (result.error, result.held) == (None, sent)
    assert [sorted(call) for call in model.calls] == [[A], sorted([*LATENT, B])]


def test_one_of_them_alone_is_loaded_where_the_model_has_no_other(tmp_path):
    shapes = {LATENT[1]: (4, 4)}
    sent, result = run(tmp_path, Model(shapes), shapes, [[(LATENT[1], torch.randn(4, 4))]])
    assert (result.error, result.held) == (None, sent)


@pytest.mark.parametrize(
    ("buckets", "named", "is_written"),
    [
        ([["x"], [A], [B]], "x: the engine's model has no such tensor", False),
        ([[A], ["x"], [B]], "x: the engine's model has no such tensor", True),
        ([[A, A], [B]], f"{A}: sent twice", False),
        ([[A], [B], [A]], f"{A}: sent twice", True),
        ([[A]], f"1 of 2 tensors were not sent: {B}", True),
        ([], f"2 of 2 tensors were not sent: {B}, {A}", False),
    ],
)
def test_what_is_wrong_is_said_and_the_sender_gets_to_its_end(
    tmp_path, model, tensors, buckets, named, is_written
):
    given = [[(name, tensors.get(name, torch.zeros(1))) for name in bucket] for bucket in buckets]
    sent, result = run(tmp_path, model, SPECS, given)
    assert sent == fingerprints_of(pair for bucket in given for pair in bucket)
    assert named in result.error
    assert result.is_written == is_written == model.get_parameter(A).any()


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(4, 4, dtype=torch.bfloat16)])
def test_another_shape_or_dtype_is_refused_before_it_is_written(tmp_path, model, tensors, wrong):
    _, result = run(tmp_path, model, SPECS, [[(A, tensors[A]), (B, wrong)]])
    assert (
        f"{B}: found {'shape (4, 3)' if wrong.dtype == torch.float32 else 'dtype bfloat16'}" in result.error
    )
    assert not result.is_written
    assert not model.get_parameter(A).any()


def test_a_model_that_does_not_hold_what_was_sent_is_found(tmp_path, model, tensors):
    model.spoiled = B
    _, result = run(tmp_path, model, SPECS, [list(tensors.items())])
    assert result.error == f"{B}: the model does not hold what was sent"
    assert result.is_written


def test_an_update_of_another_version_is_not_loaded(tmp_path, model, tensors):
    _, result = run(tmp_path, model, SPECS, [list(tensors.items())], sent_as="6")
    assert result.error == "what arrived is version 6; wanted 7"
    assert not result.is_written


def test_a_parameter_that_no_tensor_is_for_is_named_before_anything_is_written(tmp_path, tensors):
    model = Model({**SPECS, "lm_head.weight": (2, 2)})
    sent, result = run(tmp_path, model, SPECS, [list(tensors.items())])
    assert sent == {name: fingerprint(each) for name, each in tensors.items()}
    assert result.error == "lm_head.weight: the server's model has it, and no tensor is for it"
    assert not result.is_written


def test_a_host_that_does_not_see_the_folder_says_so(tmp_path, model):
    request = LoaderRequest(folder=str(tmp_path / "gone"), answer=str(tmp_path / "answer"), group_rank=1)
    receive(model, [(request.text(), torch.empty(0))])
    result = read_result(tmp_path / "answer")
    assert "gone: the server's host does not see this file" in result.error
    assert not result.is_written
    assert json.loads(request.text())["group_rank"] == 1
