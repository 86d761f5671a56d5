"""Real servers of several ranks on the CPU, which share a model in each way: what they serve, and that their parts of an update are
proven.

The model of the tensor-parallel ranks has a padded vocabulary: of its 192 rows each rank holds 96, the second only 34 that are any
token's. That of the pipeline stages has its embedding for an output layer, of which each stage has a copy; the second has two of
the three layers. Four ranks are two stages of two, of which each has half of a stage's experts.
"""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from slime_core.errors import WeightSyncError
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from slime_sglang.inside.compat import WORKER_PATCHES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ..sender import Sender

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

VOCAB = 130
PROMPT = [5, 6, 7, 129]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
SHAPES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 16384, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "dtype": "float32",
}  # fmt: skip


def llama(seed):
    config = LlamaConfig(**SHAPES, num_hidden_layers=2, tie_word_embeddings=False)
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def tied_qwen3(seed):
    config = Qwen3Config(**SHAPES, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True)
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).eval()


def qwen3_moe(seed):
    config = Qwen3MoeConfig(
        **SHAPES, num_hidden_layers=2, head_dim=16, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).eval()


#: How ranks share a model: (the model of a seed, flags of the run).
KINDS = {
    "tensor": (llama, {}),
    "pipeline": (tied_qwen3, {"sglang-pp-size": 2}),
    "experts in stages": (
        qwen3_moe,
        {"rollout-num-gpus-per-engine": 4, "sglang-pp-size": 2, "sglang-ep-size": 2},
    ),
    "attention": (qwen3_moe, {"sglang-attn-dp-size": 2}),
}


def tensors_of(model):
    """By the names of a folder: transformers itself keeps experts in one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@pytest.fixture(scope="module", params=KINDS)
def ranks(request, served_by_flags, tmp_path_factory):
    """The server, as settings start it; `model` makes that of a seed, and `newest` is the seed of the one that it serves."""
    model, own_flags = KINDS[request.param]
    folder = tmp_path_factory.mktemp("sglang-ranks")
    model_path = folder / "model"
    model(0).save_pretrained(model_path)
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t0").save_pretrained(model_path)
    flags = {
        "rollout-num-gpus-per-engine": 2,
        "sglang-max-total-tokens": 65536,
        "sglang-max-running-requests": 4,
        **own_flags,
    }
    for serving in served_by_flags(model_path, folder, flags):
        yield SimpleNamespace(
            run=serving.run, engine=serving.engine, log=serving.log, model=model, newest=0, kind=request.param
        )


@torch.no_grad()
def check_serves(ranks, model):
    answer = ranks.run(ranks.engine.generate(PROMPT, GREEDY))
    rows = model(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert answer.tokens == rows.argmax(-1).tolist()
    wanted = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert answer.log_probs == pytest.approx(wanted.tolist(), abs=1e-5, rel=0)


def update(ranks, tensors, version, transport):
    ranks.run(
        sync_weights(Sender(tensors), ranks.engine, version=version, timeout_s=240, transport=transport)
    )


def test_shared_memory_has_the_name_of_what_goes_with_the_server(ranks, shared_memory_of):
    name, files = shared_memory_of(ranks.log)
    of_group = set() if ranks.kind == "pipeline" else {"sgl_shm_"}
    assert {file.partition(name)[0] for file in files} == {"sglang_loads_"} | of_group
    assert all(name in file for file in files)


def test_ranks_meet_at_ports_of_the_run_and_so_does_attention_that_is_divided_among_them(ranks):
    """The last port that SGLang derives from where they meet is reserved too: the row has 14."""
    from sglang.srt.server_args import DP_ATTENTION_HANDSHAKE_PORT_DELTA

    assert DP_ATTENTION_HANDSHAKE_PORT_DELTA == 13
    meet = re.search(
        r"'dist_init_addr': '127.0.0.1:(\d+)'", (ranks.log / "server.log").read_text(errors="replace")
    )
    for port in (int(meet[1]), int(meet[1]) + 13):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("transport", ["memory", "distributed", "disk", "disk-delta", "nccl", "cuda-ipc"])
def test_after_an_update_all_ranks_serve_the_new_model(ranks, transport):
    check_serves(ranks, ranks.model(ranks.newest))
    seed = ranks.newest + 1
    # Compares what all hold with what was sent.
    update(ranks, tensors_of(ranks.model(seed)), str(seed), transport)
    ranks.newest = seed
    check_serves(ranks, ranks.model(seed))


def test_requests_in_flight_are_aborted_and_another_is_served(ranks, endless):
    async def abort():
        asked = asyncio.gather(*(ranks.engine.generate(PROMPT, endless) for _ in range(3)))
        while not (await ranks.engine.current_load()).running:
            await asyncio.sleep(0.02)
        await ranks.engine.abort()
        return await asked

    ended = ranks.run(abort())
    assert [each.finish_reason for each in ended] == ["abort"] * 3
    check_serves(ranks, ranks.model(ranks.newest))


def test_the_patch_for_experts_is_taken_where_they_are_divided_alone(ranks):
    """Fails when SGLang's plain PyTorch path no longer needs it."""
    (patch,) = [patch for patch in WORKER_PATCHES if "moe" in patch.name]
    check_serves(ranks, ranks.model(ranks.newest))
    log = (ranks.log / "server.log").read_text(errors="replace")
    assert (patch.log_line in log) == (ranks.kind == "experts in stages")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_tensor_that_is_missing_is_named_and_the_old_weights_serve(ranks, name):
    tensors = tensors_of(ranks.model(9))
    del tensors[name]
    with pytest.raises(WeightSyncError, match=name):
        update(ranks, tensors, "bad", "memory")
    check_serves(ranks, ranks.model(ranks.newest))


def test_bytes_that_change_on_their_way_are_named_by_the_rank_that_checks_them(ranks):
    tensors = tensors_of(ranks.model(9))
    first, second = list(tensors)[4:6]  # one is checked by each rank

    class Torn(Sender):
        async def _buckets(self):
            async for bucket, said in super()._buckets():
                yield bucket, said | {first: 1, second: 1}

    torn = Torn(tensors)
    with pytest.raises(WeightSyncError) as caught:
        ranks.run(sync_weights(torn, ranks.engine, version="bad", timeout_s=240, transport="memory"))
    assert first in str(caught.value)
    assert second in str(caught.value)
    check_serves(ranks, ranks.model(ranks.newest))
