"""What the engine generates, against transformers."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import DataError, EngineError
from slime_core.plugins.registry import Registry
from slime_core.protocols import RolloutEngine, SamplingParams
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.rundir.events import EventLog
from slime_models.cpu import multiplies_bfloat16
from slime_models.family.families.llama import LLAMA
from slime_torch.engine import TorchEngine, cache_bytes, engine_dtype
from slime_torch.factory import create_engine
from slime_torch.model.decoder import Decoder
from slime_torch.section import TorchSection

KINDS = [
    "llama",
    "llama-rope3",
    "qwen2",
    "qwen3",
    "glm4",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "qwen3_5_moe",
    "qwen3_5_text",
    "qwen3_next",
    "glm",
    "mimo",
    "gpt_oss",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v3-moonlight",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
]


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, temperature=0, **more)


def test_engine_satisfies_the_protocol(tiny):
    assert isinstance(tiny("llama").engine(), RolloutEngine)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(tiny, kind):
    model = tiny(kind)
    prompts = model.prompts(6)
    answers = model.answers(prompts, [greedy(24)] * 6)
    assert [answer.tokens for answer in answers] == [model.greedy(prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_transformers(tiny, kind):
    model = tiny(kind)
    prompts = model.prompts(12, seed=1)
    params = [SamplingParams(max_new_tokens=5 + 3 * i, temperature=0.5 + 0.1 * i, seed=i) for i in range(12)]
    for prompt, param, answer in zip(prompts, params, model.answers(prompts, params), strict=True):
        wanted = model.log_probs(prompt, answer.tokens, param.temperature)
        assert answer.log_probs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text"])
def test_more_requests_than_slots_change_nothing(tiny, kind):
    model = tiny(kind)
    prompts = model.prompts(11, seed=2)
    params = [greedy(3 + 5 * (i % 4)) for i in range(11)]
    few = model.answers(prompts, params, max_running_requests=3, max_prefill_tokens=16)
    assert [answer.tokens for answer in few] == [
        model.greedy(prompt, param.max_new_tokens) for prompt, param in zip(prompts, params, strict=True)
    ]


def test_prompts_are_prefilled_together_up_to_so_many_tokens(tiny, monkeypatch):
    model, seen, prefill = tiny("llama"), [], Decoder.prefill

    def watched(self, prompts, slots, cache, **more):
        seen.append([len(prompt) for prompt in prompts])
        return prefill(self, prompts, slots, cache, **more)

    monkeypatch.setattr(Decoder, "prefill", watched)
    prompts = [[number + 1] * length for number, length in enumerate([20, 7, 3, 9, 5])]
    model.answers(prompts, [greedy(2)] * 5, max_prefill_tokens=16)
    assert seen == [[3, 5, 7], [9], [20]]


def test_twins_share_one_prefill_and_keep_their_log_probs(tiny):
    model = tiny("qwen2")
    prompt = model.prompts(1, seed=3)[0]
    params = [SamplingParams(max_new_tokens=8 + i, seed=i) for i in range(8)]
    answers = model.answers([prompt] * 8, params, max_running_requests=5)
    assert [answer.metadata["cached_tokens"] for answer in answers] == [0] + [len(prompt)] * 7
    assert len({tuple(answer.tokens) for answer in answers}) == 8
    for answer in answers:
        assert answer.log_probs == pytest.approx(model.log_probs(prompt, answer.tokens), abs=1e-5)


def test_bfloat16_log_probs_are_near_those_of_transformers(tiny):
    model = tiny("llama")
    prompts = model.prompts(8, seed=4)
    params = [SamplingParams(max_new_tokens=16, seed=i) for i in range(8)]
    for prompt, answer in zip(prompts, model.answers(prompts, params, dtype=torch.bfloat16), strict=True):
        wanted = torch.tensor(model.log_probs(prompt, answer.tokens))
        assert (torch.tensor(answer.log_probs) - wanted).abs().mean() < 0.1


def test_same_seed_gives_the_same_tokens_in_any_company(tiny):
    model = tiny("llama")
    prompts = model.prompts(9, seed=5)
    params = [SamplingParams(max_new_tokens=20, seed=100 + i, top_p=0.9) for i in range(9)]
    alone = [model.answers([p], [q])[0].tokens for p, q in zip(prompts, params, strict=True)]
    together = model.answers(prompts, params)
    crowded = model.answers(prompts, params, max_running_requests=2)
    assert alone == [answer.tokens for answer in together] == [answer.tokens for answer in crowded]


def test_a_second_run_is_bit_exact(tiny):
    model = tiny("llama")
    prompts = model.prompts(12, seed=6)
    params = [SamplingParams(max_new_tokens=8 + i, seed=i) for i in range(12)]
    options = {"dtype": torch.bfloat16, "max_running_requests": 5}
    first, second = (model.answers(prompts, params, **options) for _ in range(2))
    assert first == second


def test_calls_that_follow_an_answer_join_the_very_next_step(tiny):
    """Two-turn conversations batch the same way in every run, so bfloat16 log-probs are the same bits."""
    model = tiny("qwen3")
    prompts = model.prompts(8, seed=7)

    async def conversation(engine, prompt, seed):
        first = await engine.generate(prompt, SamplingParams(max_new_tokens=4 + seed, seed=seed))
        again = [*prompt, *first.tokens, 65]
        return first, await engine.generate(again, SamplingParams(max_new_tokens=6, seed=seed))

    async def conversations():
        async with model.serving(dtype=torch.bfloat16, max_running_requests=6) as engine:
            return await asyncio.gather(*(conversation(engine, p, i) for i, p in enumerate(prompts)))

    assert asyncio.run(conversations()) == asyncio.run(conversations())


def test_a_finished_slot_is_refilled_while_others_run(tiny):
    model = tiny("llama")
    finished = []

    async def ask(engine, name, n):
        await engine.generate([1, 2, 3], greedy(n, min_new_tokens=n))
        finished.append(name)

    async def main():
        async with model.serving(max_running_requests=2) as engine:
            await asyncio.gather(ask(engine, "long", 60), ask(engine, "short", 5), ask(engine, "next", 5))

    asyncio.run(main())
    assert finished == ["short", "next", "long"]


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([1] * 250, greedy(7), r"250 prompt tokens and max_new_tokens 7 .* 256"),
        ([], greedy(7), "0 prompt tokens"),
        ([1, 301], greedy(7), "ids from 1 to 301"),
        ([1], greedy(0), "max_new_tokens 0"),
        ([1], SamplingParams(max_new_tokens=1, top_p=0.0), "top_p 0.0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(tiny, tokens, params, message):
    with pytest.raises(EngineError, match=message):
        tiny("llama").answers([tokens], [params])


def test_a_request_may_fill_the_whole_context(tiny):
    model = tiny("llama")
    [answer] = model.answers([[1] * 20], [greedy(12, min_new_tokens=12)], max_context_len=32)
    assert answer.finish_reason == "length"
    assert answer.log_probs == pytest.approx(
        [row.max().item() for row in model.logits([1] * 20 + answer.tokens)[19:-1].log_softmax(-1)], abs=1e-5
    )


def test_an_unsupported_rope_scaling_is_refused(tiny, tokenizer, tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = tiny("llama").module.config.to_dict() | {"rope_parameters": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="dynamic"):
        TorchEngine(tmp_path, LLAMA, tokenizer, dtype=torch.float32, section=TorchSection())


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_the_factory_reads_its_sections(tiny, tokenizer, tmp_path, dtype, wanted):
    registry = Registry.from_environment()
    flags = {
        "--hf-checkpoint": "tiny", "--prompt-data": "none.jsonl", "--rm-type": "math", "--num-rollout": "1",
        "--rollout-batch-size": "1", "--rollout-max-response-len": "8", "--torch-dtype": dtype,
        "--torch-max-context-len": "99",
    }  # fmt: skip
    words = [word for flag in flags.items() for word in flag]
    build = BuildContext(
        settings=load_settings([], words, registry=registry),
        registry=registry,
        load_tokenizer=lambda: tokenizer,
        model_path=tiny("qwen3").folder,
        run_dir=tmp_path,
    )
    engine = create_engine(build)
    assert engine.max_context_len == 99

    async def wants():
        await engine.start()
        try:
            return (await engine.open_update("memory", "1")).dtype
        finally:
            await engine.close()

    if dtype == "auto" and not torch.cuda.is_available() and not multiplies_bfloat16():
        wanted = "float32"  # the trainer's bfloat16 values, multiplied at three times the speed
    assert asyncio.run(wants()) == wanted


@pytest.mark.parametrize("trained_in", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("native", [True, False])
def test_auto_is_the_dtype_that_is_trained_in_where_its_products_are_fast(monkeypatch, trained_in, native):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("slime_torch.engine.multiplies_bfloat16", lambda: native)
    wanted = torch.bfloat16 if trained_in == "bfloat16" and native else torch.float32
    assert engine_dtype("auto", trained_in=trained_in) == wanted
    assert engine_dtype("bfloat16", trained_in=trained_in) == torch.bfloat16


@pytest.mark.parametrize("native", [True, False])
def test_attention_in_either_dtype_gives_bfloat16_models_the_same_log_probs(tiny, monkeypatch, native):
    monkeypatch.setattr("slime_torch.layers.builder.attends_in_bfloat16", lambda: native)
    model = tiny("qwen3")
    prompts = model.prompts(6, seed=5)
    params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(6)]
    for prompt, answer in zip(prompts, model.answers(prompts, params, dtype=torch.bfloat16), strict=True):
        wanted = torch.tensor(model.log_probs(prompt, answer.tokens))
        assert (torch.tensor(answer.log_probs) - wanted).abs().mean() < 0.1


def test_images_are_refused(tiny):
    with pytest.raises(EngineError, match="found 1 images; wanted none"):
        asyncio.run(tiny("llama").engine().generate([1], greedy(1), images=["x.png"]))


def test_behind_a_limit_equal_calls_give_equal_bits_and_the_tokens_are_those_without_it(tiny):
    """Eleven requests in three places: who follows whom into a batch does not depend on timing."""
    model, found = tiny("qwen3"), []
    prompts = model.prompts(11, seed=4)
    params = [SamplingParams(max_new_tokens=3 + 5 * (i % 4), seed=i) for i in range(11)]

    async def limited(limit):
        async with asyncio.timeout(300), model.serving() as engine:
            behind = AbortableEngine(engine, ConcurrencyLimit(limit, engine, EventLog()))
            calls = (behind.generate(*call) for call in zip(prompts, params, strict=True))
            return [(answer.tokens, answer.log_probs) for answer in await asyncio.gather(*calls)]

    for limit in (3, 3, None):
        found.append(asyncio.run(limited(limit)))
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[2]]


def test_a_cache_of_a_given_length_is_not_cut_to_half_of_the_memory():
    cpu = torch.device("cpu")
    assert cache_bytes(TorchSection(max_total_tokens=64), cpu) is None
    assert cache_bytes(TorchSection(), cpu) > 2**27
