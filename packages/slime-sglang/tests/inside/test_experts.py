"""Models with experts on a real server: what it generates, what it holds after an update, and where it sent each token."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.hf.folder import HfCheckpoint
from slime_models.tensor_spec import Spec
from slime_models.transfer.staging import StagingFolder
from slime_sglang.engine import SglangEngine
from slime_sglang.generation.response import PartialResponse
from slime_sglang.inside.compat import PATCHES
from slime_sglang.inside.loader import check
from slime_sglang.inside.parameters import held_tensors
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LoaderRequest, read_result
from slime_sglang.weights.receiver import create_receiver
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from ..sender import Sender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LAYERS, EXPERTS, TOPK = 2, 4, 2
PROMPTS = [[5, 6, 7, 8], [9], [100, 3, 77, 12, 64, 31, 2]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
LONG = SamplingParams(max_new_tokens=240, min_new_tokens=240, temperature=0)


SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": TOPK,
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 127,
    "dtype": "float32",
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=EXPERTS),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
}
FAMILIES = {"qwen3_moe": QWEN3_MOE, "glm4_moe": GLM4_MOE}


def experts_model(kind, seed, folder):
    """A random float32 model whose layers send a token to two of four experts, and its folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return model


def sender_of(folder):
    return Sender(dict(HfCheckpoint(folder)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.faults, pytest.mark.proves(kind, "sglang")]) for kind in CONFIGS
    ],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folders(kind, model_path, tmp_path_factory):
    """The folders of two models."""
    found = [tmp_path_factory.mktemp(f"experts-{seed}") for seed in (0, 1)]
    for folder in found:
        for file in model_path.glob("*token*"):
            shutil.copy(file, folder)
    return found


@pytest.fixture(scope="module")
def models(kind, folders):
    """Their models; the server starts with the first."""
    return [experts_model(kind, seed, folder) for seed, folder in enumerate(folders)]


@pytest.fixture(scope="module")
def serving(kind, serving_of, models, folders, tmp_path_factory):
    """A started engine whose completions say which experts each token passed."""
    folder = tmp_path_factory.mktemp("experts-server")
    section = SglangSection(
        server_args={"max_total_tokens": 65536, "max_running_requests": 4, "stream_interval": 4},
        start_timeout_s=600,
        staging_dir=folder,
    )
    receiver = create_receiver(
        folders[0],
        FAMILIES[kind],
        dtype="float32",
        section=section,
        registry=Registry(),
        disk_dir=folder / "weights",
    )
    engine = SglangEngine(
        ServerSettings(
            model_path=folders[0],
            dtype="float32",
            section=section,
            folder=folder,
            returns_routed_experts=True,
        ),
        receiver=receiver,
    )
    yield from serving_of(engine, log=folder / "server.log", staging=folder)


def layers_with_experts(model):
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def routes_of(model, tokens):
    """The experts of each token in each layer that has any, by one pass of transformers, in ascending order."""
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: chosen.append(output[-1]))
        for layer in layers_with_experts(model)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(-1).values.numpy()


def check_routes(model, prompt, answer):
    """Check that an answer says where transformers sends its tokens."""
    routes = np.sort(answer.metadata["routed_experts"], axis=-1)
    assert routes.shape[1] == LAYERS
    routes = routes[:, -len(layers_with_experts(model)) :]  # dense layers are the first
    assert np.array_equal(routes, routes_of(model, [*prompt, *answer.tokens[:-1]]))


@pytest.fixture
def check_serves(serving, log_probs_of):
    """Checks that the server's weights are those of a model, and that it sends tokens to the same experts."""

    def check(model):
        async def scenario():
            return await asyncio.gather(*(serving.engine.generate(prompt, GREEDY) for prompt in PROMPTS))

        for prompt, answer in zip(PROMPTS, serving.run(scenario()), strict=True):
            log_probs, likeliest = log_probs_of(model, prompt, answer.tokens)
            assert answer.tokens == likeliest
            assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)
            check_routes(model, prompt, answer)

    return check


def update(serving, sender, version, transport="memory"):
    serving.run(sync_weights(sender, serving.engine, version=version, timeout_s=240, transport=transport))


def test_tokens_log_probs_and_routes_are_those_of_transformers(models, check_serves):
    check_serves(models[0])


def test_a_request_that_is_aborted_has_the_routes_of_what_was_generated(serving, models, in_flight, endless):
    async def scenario():
        response = PartialResponse(PROMPTS[0], endless)
        task = asyncio.ensure_future(serving.engine.extend(response, stream=True))
        await in_flight(response)
        await serving.engine.abort()
        await task
        return response.completion("none")

    answer = serving.run(scenario())
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.tokens) < endless.max_new_tokens
    check_routes(models[0], PROMPTS[0], answer)


def test_a_request_that_was_paused_has_the_routes_of_all_its_tokens(serving, models, in_flight):
    async def scenario():
        response = PartialResponse(PROMPTS[0], LONG)
        task = asyncio.ensure_future(serving.engine.extend(response, stream=True))
        await in_flight(response)
        await serving.engine.pause()
        await serving.engine.resume()
        await task
        return response.completion("none")

    answer = serving.run(scenario())
    assert len(answer.tokens) == LONG.max_new_tokens
    check_routes(models[0], PROMPTS[0], answer)


@pytest.mark.parametrize("transport", ["memory", "disk-delta"])
def test_after_updates_they_are_those_of_the_newest_model(serving, models, folders, check_serves, transport):
    for version, number in (("1", 1), ("2", 0), ("3", 1)):
        update(serving, sender_of(folders[number]), version, transport)
    check_serves(models[1])


def test_a_missing_expert_is_named_and_the_old_weights_serve(serving, models, folders, check_serves):
    update(serving, sender_of(folders[1]), "1")
    sender = sender_of(folders[0])
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del sender.tensors[name]
    with pytest.raises(
        WeightSyncError, match=r"1 of \d+ tensors were not sent: .*experts\.3\.up_proj\.weight"
    ):
        update(serving, sender, "bad")
    check_serves(models[1])


def test_patches_for_routes_are_still_needed(serving):
    """Fails when SGLang no longer registers host memory with CUDA, or when PyTorch without a GPU no longer refuses it."""
    (patch,) = [patch for patch in PATCHES if patch.name == "torch.cuda.cudart"]
    assert patch.log_line in serving.log.read_text(errors="replace")


def test_each_expert_is_found_under_its_name_without_what_pads_it():
    """Two experts of 3 rows for gate and up each and 2 columns, in parameters that are padded to 4 rows and 3 columns."""
    mlp = torch.nn.Module()
    mlp.w13_weight = torch.nn.Parameter(torch.arange(48.0).view(2, 8, 3))
    mlp.w2_weight = torch.nn.Parameter(torch.arange(24.0).view(2, 3, 4))
    model = torch.nn.Module()
    model.experts = mlp
    shapes = {f"experts.{e}.{part}.weight": (3, 2) for e in range(2) for part in ("gate_proj", "up_proj")}
    shapes |= {f"experts.{e}.down_proj.weight": (2, 3) for e in range(2)}
    held = {name: tensor.tolist() for name, tensor, _ in held_tensors(model, shapes)}
    assert held == {
        "experts.0.gate_proj.weight": [[0, 1], [3, 4], [6, 7]],
        "experts.0.up_proj.weight": [[12, 13], [15, 16], [18, 19]],
        "experts.1.gate_proj.weight": [[24, 25], [27, 28], [30, 31]],
        "experts.1.up_proj.weight": [[36, 37], [39, 40], [42, 43]],
        "experts.0.down_proj.weight": [[0, 1, 2], [4, 5, 6]],
        "experts.1.down_proj.weight": [[12, 13, 14], [16, 17, 18]],
    }


def test_two_ranks_share_the_rows_of_gate_and_up_and_the_columns_of_down():
    """An expert of 4 rows for gate and up each, of which the second rank has the last 2, padded to 3."""
    mlp = torch.nn.Module()
    mlp.w13_weight = torch.nn.Parameter(torch.arange(18.0).view(1, 6, 3))
    mlp.w2_weight = torch.nn.Parameter(torch.arange(9.0).view(1, 3, 3))
    model = torch.nn.Module()
    model.experts = mlp
    shapes = {f"experts.0.{part}_proj.weight": (4, 3) for part in ("gate", "up")}
    shapes |= {"experts.0.down_proj.weight": (3, 4)}
    held = {
        name: (tensor.tolist(), index)
        for name, tensor, index in held_tensors(model, shapes, rank=1, n_ranks=2)
    }
    assert held == {
        "experts.0.gate_proj.weight": ([[0, 1, 2], [3, 4, 5]], (slice(2, 4), slice(0, 3))),
        "experts.0.up_proj.weight": ([[9, 10, 11], [12, 13, 14]], (slice(2, 4), slice(0, 3))),
        "experts.0.down_proj.weight": ([[0, 1], [3, 4], [6, 7]], (slice(0, 3), slice(2, 4))),
    }


def test_a_parameter_that_no_tensor_is_for_is_named(tmp_path):
    """As SGLang's qwen3_moe has an output layer of its own, also where the model shares the embedding's."""
    staging = StagingFolder(tmp_path / "update", specs={"weight": Spec(shape=(2, 3), dtype="float32")})
    staging.begin("1")
    staging.put([("weight", torch.ones(2, 3))], {})
    staging.seal()
    request = LoaderRequest(folder=str(tmp_path / "update"), answer=str(tmp_path / "answer.json"))
    for bias, error in ((False, None), (True, "bias: the server's model has it, and no tensor is for it")):
        check(torch.nn.Linear(3, 2, bias=bias), [(request.text(), torch.empty(0))])
        assert read_result(tmp_path / "answer.json").error == error
