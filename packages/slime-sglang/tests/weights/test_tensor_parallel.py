"""A real server of two tensor-parallel ranks on the CPU: what it serves, and that its parts of an update are proven.

The model's vocabulary is padded: of its 192 rows each rank holds 96, the second only 34 that are any token's.
"""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..sender import Sender

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

VOCAB = 130
PROMPT = [5, 6, 7, 129]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def llama(seed):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def tensors_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def ranks(served_by_flags, tmp_path_factory):
    """The server, as settings start it."""
    folder = tmp_path_factory.mktemp("sglang-ranks")
    model_path = folder / "model"
    llama(0).save_pretrained(model_path)
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t0").save_pretrained(model_path)
    flags = {
        "rollout-num-gpus-per-engine": 2,
        "sglang-max-total-tokens": 1024,
        "sglang-max-running-requests": 4,
    }
    yield from served_by_flags(model_path, folder, flags)


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
    assert {file.partition(name)[0] for file in files} == {"sglang_loads_", "sgl_shm_"}
    assert all(name in file for file in files)


#: Seed of the model that the tests before have left.
NEWEST = 6


@pytest.mark.parametrize(
    ("transport", "seed"),
    [("memory", 1), ("distributed", 2), ("disk", 3), ("disk-delta", 4), ("nccl", 5), ("cuda-ipc", NEWEST)],
)
def test_after_an_update_both_ranks_serve_the_new_model(ranks, transport, seed):
    check_serves(ranks, llama(seed - 1))
    update(
        ranks, tensors_of(llama(seed)), str(seed), transport
    )  # which compares what both hold with what was sent
    check_serves(ranks, llama(seed))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_tensor_that_is_missing_is_named_and_the_old_weights_serve(ranks, name):
    tensors = tensors_of(llama(9))
    del tensors[name]
    with pytest.raises(WeightSyncError, match=name):
        update(ranks, tensors, "bad", "memory")
    check_serves(ranks, llama(NEWEST))


def test_bytes_that_change_on_their_way_are_named_by_the_rank_that_checks_them(ranks):
    tensors = tensors_of(llama(9))
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
    check_serves(ranks, llama(NEWEST))
