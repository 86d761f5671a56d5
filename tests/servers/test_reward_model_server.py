"""`reward_model` beside a real SGLang server, which serves a random llama with two outputs on the CPU.

It is the second model of a run (`--sglang-config`), beside a policy of one engine. Both are asked by transformers, too, one
text at a time.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams, TrainerCapabilities
from slime_core.rewards.pool import RewardPool
from slime_core.run.assemble import make_scorer
from slime_core.run.build import make_build
from slime_core.rundir.served_models import key_of, resolve_url
from slime_core.samples import Sample
from slime_core.weights.sync import sync_weights
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.sender import WeightSender
from slime_rm.remote.teacher import ServedTeacher, TeacherSettings
from slime_sglang import hooks
from slime_sglang.factory import create_engine
from slime_sglang.http.client import SglangClient
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

VOCAB, BOS, LONGEST = 128, 0, 64
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


def causal(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=BOS, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


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


@pytest.fixture(scope="module")
def policy(tokenizer, tmp_path_factory):
    """Folder of the policy."""
    path = tmp_path_factory.mktemp("policy")
    causal(0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(policy, folder, tmp_path_factory):
    """A run's folder, its engine, and a function that awaits something beside it."""
    home = tmp_path_factory.mktemp("served")
    groups = home / "groups.yaml"
    groups.write_text(
        f"""sglang:
- name: policy
  server_groups:
  - {{num_gpus: 1, overrides: {{max_running_requests: 3, stream_interval: 7}}}}
  - {{worker_type: placeholder, num_gpus: 2}}
- name: scores
  model_path: {folder}
  server_groups: [{{num_gpus: 1, overrides: {{is_embedding: true}}}}]
"""
    )
    flags = {
        "hf-checkpoint": policy, "rollout-engine": "sglang", "rollout-batch-size": 1, "rollout-max-response-len": 8,
        "output-dir": home, "sglang-config": groups, "rollout-num-gpus": 4, "sglang-dtype": "float32",
        "sglang-staging-dir": home, "sglang-max-total-tokens": 2048, "sglang-max-running-requests": 8,
        "reward-model-url": "served:scores", "rm-type": "reward_model",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    registry = Registry.from_environment()
    settings = load_settings([], [*words, "--rm-args", '{"output": 1}'], registry=registry)
    assert list(hooks.slime_check_config(settings=settings, registry=registry)) == []
    build = make_build(settings, registry)
    engine = create_engine(build)
    with asyncio.Runner() as runner:
        try:
            runner.run(engine.start())
            yield build, engine, runner.run
        finally:
            runner.run(engine.close())
    with pytest.raises(ConfigError):
        resolve_url("served:scores", build.run_dir)


@pytest.fixture(scope="module")
def url(run):
    """Address of the server."""
    build, *_ = run
    (address,) = resolve_url("served:scores", build.run_dir)
    return address


def test_the_key_is_in_the_file_for_rewards_alone_and_that_is_the_users(run):
    build, *_ = run
    key = key_of("served:scores", build.run_dir).encode()
    files = [path for path in build.run_dir.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert files == [build.run_dir / "served/scores.json"]
    assert files[0].stat().st_mode & 0o777 == 0o600


def scores(run, samples, **options):
    """Return what a pool of the reward gives."""
    build, *_ = run

    async def main():
        given = {"reward_model_url": "served:scores", "run_dir": str(build.run_dir), **options}
        async with RewardPool(
            "slime_rm.remote.reward_model:RewardModel", given, workers=1, timeout_s=60
        ) as pool:
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
    run, model, tokenizer, samples, output, batch_size
):
    found = [result.score for result in scores(run, samples, output=output, batch_size=batch_size)]
    ids = [tokenizer(sample.prompt + sample.response).input_ids for sample in samples]
    assert {each[0] for each in ids} == {BOS}
    expected = [wanted(model, each)[output].item() for each in ids]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(each, 3) for each in expected}) > 25


def test_probabilities_of_classes_are_those_of_transformers(run, model, tokenizer, samples):
    found = [result.score for result in scores(run, samples[:9], api="openai", output=1, batch_size=4)]
    ids = [tokenizer(sample.prompt + sample.response).input_ids for sample in samples[:9]]
    assert found == pytest.approx([wanted(model, each).softmax(0)[1].item() for each in ids], abs=1e-5)


def test_a_conversation_is_scored_as_the_models_template_renders_it(run, model, tokenizer, folder):
    messages = [{"role": "system", "content": "t5 t6"}, {"role": "user", "content": "t7"}]
    asked = Sample(index=0, prompt=messages, response="t8 t9")
    (found,) = scores(run, [asked], output=0, chat_template_from=str(folder))
    whole = [*messages, {"role": "assistant", "content": "t8 t9"}]
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    assert ids == [BOS, 127, 5, 6, 127, 7, 127, 8, 9]
    assert found.score == pytest.approx(wanted(model, ids)[0].item(), abs=1e-5)


def test_a_text_that_is_too_long_for_the_model_fails_alone(run, samples):
    long = Sample(index=99, prompt=" ".join(["t1"] * LONGEST), response=" t2")
    first, failure, blank, last = scores(
        run, [samples[0], long, Sample(index=98), samples[1]], batch_size=3, output=0
    )
    assert "there is nothing to score" in blank.message
    assert (failure.kind, failure.message.split(":")[0]) == ("raised", "sample 99")
    assert "refused with status 400" in failure.message
    assert [type(first.score), type(last.score)] == [float, float]


@torch.no_grad()
def test_updates_reach_the_policy_alone(run, model, tokenizer, samples):
    build, engine, await_beside = run
    text = tokenizer(samples[0].prompt + samples[0].response).input_ids

    async def ask():
        async with make_scorer(build.settings, build.registry)._pools["reward_model"] as pool:
            score = (await pool.score(samples[0])).score
        return await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0)), score

    for seed in (0, 1):
        if seed:
            tensors = {name: parameter.detach() for name, parameter in causal(seed).named_parameters()}
            await_beside(sync_weights(_Sender(tensors), engine, version="1", timeout_s=60))
        answer, score = await_beside(ask())
        logits = causal(seed)(torch.tensor([[1, 2, 3, *answer.tokens]])).logits[0, 2:-1]
        assert answer.tokens == logits.argmax(-1).tolist()
        assert score == pytest.approx(wanted(model, text)[1].item(), abs=1e-5)


@torch.no_grad()
def test_a_teacher_that_sglang_serves_gives_the_log_probs_of_transformers(run, tmp_path):
    build, engine, await_beside = run
    (tmp_path / "key").write_text(key_of("served:scores", build.run_dir))
    asked = {"opd_teacher_url": engine._replicas[0].engine.url, "api_key_file": str(tmp_path / "key")}
    taught = [Sample(index=i, tokens=[7, 3, 9][: i + 1]) for i in range(3)]
    for sample in taught:
        sample.append_response([5, 1, 88, 2], text="", log_probs=[0.0] * 4)

    async def main():
        teacher = ServedTeacher(settings=TeacherSettings(**asked))
        for sample in taught:
            await teacher(build.settings, sample, rollout_id=0, evaluation=False)
        await teacher.close()

    asyncio.run(main())
    answer = await_beside(engine.generate([1], SamplingParams(max_new_tokens=1)))
    model = causal(1 if answer.weight_version == "1" else 0)  # which weights it has: see the test before
    for sample in taught:
        logits = model(torch.tensor([sample.tokens])).logits[0, -5:-1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(sample.tokens[-4:])[:, None])[:, 0]
        assert list(sample.teacher_log_probs) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_group_starts_its_servers_with_arguments_of_its_own(run, url):
    build, engine, await_beside = run

    async def info_of(address):
        client = SglangClient(address, connections=1, retries=0, key=key_of("served:scores", build.run_dir))
        try:
            return await client.get("/server_info", timeout_s=60)
        finally:
            await client.close()

    of_policy = await_beside(info_of(engine._replicas[0].engine.url))
    of_scores = await_beside(info_of(url))
    names = (
        "max_running_requests",
        "stream_interval",
        "is_embedding",
        "max_total_tokens",
        "served_model_name",
    )
    assert [of_policy[name] for name in names[:4]] == [3, 7, False, 2048]
    assert [of_scores[name] for name in names] == [8, 32, True, 2048, "scores"]


class _Sender:
    """The sending half of a trainer."""

    capabilities = TrainerCapabilities(other_transports=True)

    def __init__(self, tensors):
        self._tensors, self._sender = tensors, WeightSender(asyncio.to_thread, Registry())

    async def _buckets(self):
        yield (
            list(self._tensors.items()),
            {name: fingerprint(tensor) for name, tensor in self._tensors.items()},
        )

    async def send(self, plan):
        return await self._sender.send(plan, self._buckets())
