"""`reward_model` beside a real SGLang server, which serves a random llama with two outputs on the CPU.

The server's model is asked by transformers, too, one text at a time.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import DeadlineError, EngineError
from slime_core.rewards.pool import RewardPool
from slime_core.sample import Sample
from slime_sglang.client import SglangClient
from slime_sglang.process import ServerProcess, free_port
from slime_sglang.server import server_command, server_environment
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

VOCAB, BOS, LONGEST = 128, 0, 64
START_S = 500
TEMPLATE = "{{ bos_token }}{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.2, num_labels=2,
        bos_token_id=BOS, eos_token_id=None, pad_token_id=None, dtype="float32",
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    """Word `ti` is the id i; a text begins with `t0`, which the tokenizer puts there."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token=f"t{VOCAB - 1}"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="t0 $A", special_tokens=[("t0", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward-model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def _ready(server: ServerProcess, client: SglangClient) -> None:
    async with asyncio.timeout(START_S):
        while server.failure is None:
            try:
                return await client.get("/health", timeout_s=2)
            except (EngineError, DeadlineError):
                await asyncio.sleep(0.25)
    raise AssertionError(server.failure)


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """Address of the server."""
    log, port = tmp_path_factory.mktemp("reward-server") / "server.log", free_port()
    command = server_command(folder, port=port, dtype="float32", arguments=["--is-embedding"])
    server = ServerProcess(command, environment=server_environment(), log=log)
    with asyncio.Runner() as runner:

        async def start():
            client = SglangClient(f"http://127.0.0.1:{port}", connections=1, retries=0)
            await server.start()
            try:
                await _ready(server, client)
            finally:
                await client.close()

        try:
            runner.run(start())
            yield f"http://127.0.0.1:{port}"
        finally:
            runner.run(server.stop())


def scores(url, samples, **options):
    """Return what a pool of the reward gives."""

    async def main():
        given = {"reward_model_url": url, **options}
        async with RewardPool("slime_rm.reward_model:RewardModel", given, workers=1, timeout_s=60) as pool:
            return await asyncio.gather(*map(pool.score, samples))

    return asyncio.run(main())


@torch.no_grad()
def wanted(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def samples():
    """Forty texts of 2 to 41 words, half in the prompt; some twice, some the beginning of others."""
    draw = torch.Generator().manual_seed(1)
    words = [f"t{i}" for i in torch.randint(1, VOCAB - 1, (64,), generator=draw).tolist()]
    lengths = torch.randint(1, 21, (40,), generator=draw).tolist()
    starts = torch.randint(0, 3, (40,), generator=draw).tolist()
    return [
        Sample(index=i, prompt=" ".join(words[start : start + n]), response=" " + " ".join(words[start + n : start + 2 * n]))
        for i, (n, start) in enumerate(zip(lengths, starts, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(("output", "batch_size"), [(0, 7), (1, 16)])
def test_scores_are_those_of_transformers_in_the_order_of_the_samples(
    url, model, tokenizer, samples, output, batch_size
):
    found = [result.score for result in scores(url, samples, output=output, batch_size=batch_size)]
    ids = [tokenizer(sample.prompt + sample.response).input_ids for sample in samples]
    assert {each[0] for each in ids} == {BOS}
    expected = [wanted(model, each)[output].item() for each in ids]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(each, 3) for each in expected}) > 25


def test_probabilities_of_classes_are_those_of_transformers(url, model, tokenizer, samples):
    found = [result.score for result in scores(url, samples[:9], api="openai", output=1, batch_size=4)]
    ids = [tokenizer(sample.prompt + sample.response).input_ids for sample in samples[:9]]
    assert found == pytest.approx([wanted(model, each).softmax(0)[1].item() for each in ids], abs=1e-5)


def test_a_conversation_is_scored_as_the_models_template_renders_it(url, model, tokenizer, folder):
    messages = [{"role": "system", "content": "t5 t6"}, {"role": "user", "content": "t7"}]
    asked = Sample(index=0, prompt=messages, response="t8 t9")
    (found,) = scores(url, [asked], output=0, chat_template_from=str(folder))
    whole = [*messages, {"role": "assistant", "content": "t8 t9"}]
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    assert ids == [BOS, 127, 5, 6, 127, 7, 127, 8, 9]
    assert found.score == pytest.approx(wanted(model, ids)[0].item(), abs=1e-5)


def test_a_text_that_is_too_long_for_the_model_fails_alone(url, samples):
    long = Sample(index=99, prompt=" ".join(["t1"] * LONGEST), response=" t2")
    first, failure, blank, last = scores(
        url, [samples[0], long, Sample(index=98), samples[1]], batch_size=3, output=0
    )
    assert "there is nothing to score" in blank.message
    assert (failure.kind, failure.message.split(":")[0]) == ("raised", "sample 99")
    assert "refused with status 400" in failure.message
    assert [type(first.score), type(last.score)] == [float, float]
