"""Servers of quantised weights, on the CPU: what they generate, what updates bring them, and what is refused by name."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.groups import OWN_TRANSPORTS
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, save_hf
from slime_models.quantization.blocks import quantize_fp8
from slime_models.quantization.config import read_quantization
from slime_models.quantization.folder import quantize_folder
from slime_models.tensor_spec import Spec
from slime_models.transfer.staging import StagingFolder
from slime_sglang.engine import SglangEngine
from slime_sglang.inside.loader import check, load
from slime_sglang.inside.quantized_cpu import dequantized
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LoaderRequest, read_result
from slime_sglang.weights.receiver import create_receiver
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ..sender import Sender

pytestmark = pytest.mark.timeout(1200)

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
VERSIONS = count()


def test_blocks_with_powers_of_two_are_sglang_s_own_bit_for_bit():
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs, their_scales = per_block_cast_to_fp8(weight)
    codes, scales = quantize_fp8(weight, rows=128, columns=128, power_of_two=True)
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))


def test_each_matrix_that_is_stacked_is_multiplied_by_its_own_scale():
    codes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).to(torch.float8_e4m3fn)
    layer = SimpleNamespace(
        weight=codes,
        weight_scale=torch.tensor([2.0, 10.0]),
        logical_widths=[1, 2],
        params_dtype=torch.float32,
    )
    assert dequantized(layer).tolist() == [[2, 4], [30, 40], [50, 60]]


class FixedWeights(torch.nn.Module):
    """A server's model that has a router in float32, and two packed matrices in one parameter."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(3, 2, bias=False)
        self.mlp = torch.nn.ModuleDict({"gate_up_proj": torch.nn.Module()})
        self.stack = self.mlp["gate_up_proj"]
        for name, tensor in {"weight_packed": torch.zeros(3, 4), "weight_shape": torch.zeros(2)}.items():
            self.stack.register_parameter(name, torch.nn.Parameter(tensor.int(), requires_grad=False))

    def load_weights(self, tensors):
        found = dict(tensors)
        self.gate.weight.copy_(found["gate.weight"])
        rows = [found[f"mlp.{part}_proj.weight_packed"] for part in ("gate", "up")]
        self.stack.weight_packed.copy_(torch.cat(rows))
        self.stack.weight_shape.copy_(found["mlp.up_proj.weight_shape"])


def test_what_a_server_keeps_in_float32_or_once_for_two_is_held_as_it_was_sent(tmp_path):
    tensors = {
        "gate.weight": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "mlp.gate_proj.weight_packed": torch.arange(4, dtype=torch.int32)[None],
        "mlp.gate_proj.weight_shape": torch.tensor([1, 32]),
        "mlp.up_proj.weight_packed": torch.arange(8, dtype=torch.int32).reshape(2, 4),
        "mlp.up_proj.weight_shape": torch.tensor([2, 32]),
    }
    staging = StagingFolder(
        tmp_path / "update",
        specs={
            name: Spec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        },
    )
    staging.begin("1")
    staging.put(list(tensors.items()), {})
    sent = staging.seal().fingerprint
    request = LoaderRequest(folder=str(staging.folder), answer=str(tmp_path / "result"))
    model = FixedWeights()
    check(model, [(request.text(), torch.empty(0))])
    assert read_result(tmp_path / "result").error is None
    load(model, [(request.text(), torch.empty(0))])
    assert read_result(tmp_path / "result").held == sent


SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 127,
    "dtype": "float32",
}


def dense():
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=256))


def with_experts():
    """Each layer sends a token to two of four experts."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, head_dim=32, intermediate_size=256))


#: Format -> (family, random model) that it is tested on.
MODELS = {
    "fp8-block": (QWEN3_MOE, with_experts),
    "fp8-channel": (LLAMA, dense),
    "fp8-tensor": (LLAMA, dense),
    "int4": (LLAMA, dense),
}
#: Each is a server of its own.
PARAMETERS = [
    pytest.param(method, marks=pytest.mark.faults)
    for method in ("fp8-block", "fp8-channel", "fp8-tensor", "int4")
]


class Models:
    """Random models of one family, in float32 and quantised."""

    def __init__(self, method, tokenizer, place):
        self.family, self._make = MODELS[method]
        self._tokenizer, self._place = tokenizer, place
        self.folder = place / "quantised"
        quantize_folder(
            self.plain(0),
            self.folder,
            self.family,
            method=method,
            ignore=["layers.1.self_attn"],
            group_size=32,
            max_file_bytes=10**9,
        )
        self.quantization = read_quantization(read_config(self.folder))

    def plain(self, seed):
        """The folder of a model."""
        folder = self._place / str(seed)
        if not folder.exists():
            torch.manual_seed(seed)
            self._make().save_pretrained(folder)
            for file in self._tokenizer.glob("*token*"):
                shutil.copy(file, folder)
        return folder

    def tensors(self, seed):
        return dict(HfCheckpoint(self.plain(seed)))

    def meant(self, seed):
        """What a server of the quantised model computes: the model of the dequantised weights."""
        folder = self._place / f"{seed}-meant"
        if not folder.exists():
            tensors = self.tensors(seed)
            for name, tensor in tensors.items():
                if self.quantization.covers(name, tuple(tensor.shape)):
                    parts = dict(self.quantization.tensors(name, tensor))
                    tensors[name] = self.quantization.dequantized(name, parts)
            save_hf(folder, tensors.items(), config_from=self.plain(seed))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module", params=PARAMETERS)
def models(request, model_path, tmp_path_factory):
    return Models(request.param, model_path, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def serving(serving_of, models, tmp_path_factory):
    """A started engine of the first model, quantised."""
    place = tmp_path_factory.mktemp("quantised-server")
    section = SglangSection(
        server_args={"max_total_tokens": 1024, "max_running_requests": 4},
        start_timeout_s=600,
        staging_dir=place,
    )
    disk = place / "weights"
    receiver = create_receiver(
        models.folder, models.family, dtype="float32", section=section, registry=Registry(), disk_dir=disk
    )
    engine = SglangEngine(
        ServerSettings(model_path=models.folder, dtype="float32", section=section, folder=place),
        receiver=receiver,
    )
    yield from serving_of(engine, log=place / "server.log", staging=place)


@pytest.fixture
def check_serves(serving, models, log_probs_of):
    """Checks that the server's weights are those of a model in few bits."""

    def check(seed):
        answer = serving.run(serving.engine.generate(PROMPT, GREEDY))
        log_probs, likeliest = log_probs_of(models.meant(seed), PROMPT, answer.tokens)
        assert answer.tokens == likeliest
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)

    return check


def update(serving, sender, transport="memory"):
    work = sync_weights(
        sender, serving.engine, version=str(next(VERSIONS)), timeout_s=240, transport=transport
    )
    serving.run(work)


def test_after_each_of_several_updates_the_server_is_the_newest_model_in_few_bits(
    serving, models, check_serves
):
    check_serves(0)
    for seed in (1, 2, 3):
        update(serving, Sender(models.tensors(seed)))
        check_serves(seed)


@pytest.mark.parametrize("transport", sorted(set(OWN_TRANSPORTS) - {"memory"}))
def test_every_transport_brings_codes_and_scales(serving, models, check_serves, transport):
    sender = Sender(models.tensors(4))
    update(serving, sender, transport)
    sender.tensors = models.tensors(5)
    update(serving, sender, transport)
    check_serves(5)


class Meddler(Sender):
    """Changes what leaves it, between quantising and sending."""

    def __init__(self, tensors, meddle):
        super().__init__(tensors)
        self._meddle = meddle

    async def send(self, plan):
        channel = plan.channel
        put = channel.put

        async def meddled(bucket, fingerprints):
            await put([pair for name, tensor in bucket for pair in self._meddle(name, tensor)], fingerprints)

        channel.put = meddled
        return await super().send(plan)


def damaged(name, tensor):
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[2] ^= 4
    return [(name, changed)]


FAULTS = {
    "damaged": (damaged, "the bytes that arrived are not those that were sent"),
    "missing": (lambda name, tensor: [], "1 of .* tensors were not sent"),
    "misshapen": (lambda name, tensor: [(name, tensor[:-1])], "found shape"),
    "of another dtype": (
        lambda name, tensor: [(name, tensor.double())],
        "found dtype float64; wanted float32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_named_and_the_old_weights_serve(serving, models, check_serves, fault):
    scale = min(
        name
        for name in HfCheckpoint(models.folder)
        if "layers.1.mlp" in name and "up_proj.weight_scale" in name
    )
    meddle, said = FAULTS[fault]
    update(serving, Sender(models.tensors(6)))
    sender = Meddler(
        models.tensors(7), lambda name, tensor: meddle(name, tensor) if name == scale else [(name, tensor)]
    )
    with pytest.raises(WeightSyncError, match=said) as error:
        update(serving, sender)
    assert scale in str(error.value)
    check_serves(6)


def test_a_sender_that_does_not_quantise_is_refused_by_name(serving, models, check_serves):
    class Plain(Sender):
        async def send(self, plan):
            return await super().send(dataclasses.replace(plan, quantization=None))

    update(serving, Sender(models.tensors(6)))
    with pytest.raises(WeightSyncError, match=r"layers\.0\..*_proj\.weight: "):
        update(serving, Plain(models.tensors(7)))
    check_serves(6)


def test_weights_that_are_not_finite_are_refused_by_name_and_the_old_ones_serve(
    serving, models, check_serves
):
    tensors = models.tensors(7)
    name = min(name for name in tensors if "layers.1.mlp" in name and "down_proj" in name)
    tensors[name] = tensors[name] * float("nan")
    update(serving, Sender(models.tensors(6)))
    with pytest.raises(WeightSyncError, match=f"{name}: cannot be quantised"):
        update(serving, Sender(tensors))
    check_serves(6)
