"""Images on a real server: what it answers, what ids it reads, and what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rundir.records import read_records
from slime_core.samples import Sample, Status
from slime_models.hf.tokenizer import load_tokenizer
from slime_sglang.engine import SglangEngine
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings

from ..tiny_vision import IMAGE, PLACEHOLDER, START, TinyVision, as_url, picture

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

A, B = picture(1, width=24, height=32), picture(2, width=40, height=16)
TEXT = f"t5 t6 {IMAGE} t7 t8"
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A model that sees images."""
    return TinyVision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(vision):
    return load_tokenizer(vision.folder)


@pytest.fixture(scope="module")
def serving(serving_of, vision, tmp_path_factory):
    """A started engine of it."""
    folder = tmp_path_factory.mktemp("vision-server")
    section = SglangSection(
        server_args={"max_total_tokens": 65536, "max_running_requests": 4}, start_timeout_s=600
    )
    engine = SglangEngine(
        ServerSettings(model_path=vision.folder, dtype="float32", section=section, folder=folder)
    )
    yield from serving_of(engine, log=folder / "server.log", staging=folder)


@pytest.fixture(scope="module")
def ask(serving, tokenizer):
    """Generates a response to a prompt; returns the prompt's ids and the completion."""

    def run(text, images, params=GREEDY):
        tokens = tokenizer.encode_with_images(text, images) if images else tokenizer.encode(text)
        return tokens, serving.run(serving.engine.generate(tokens, params, images=images))

    return run


@pytest.mark.parametrize(
    ("text", "images"),
    [
        (TEXT, [A]),
        (TEXT, [B]),
        (TEXT, [picture(4, width=301, height=221)]),
        (f"t1 {IMAGE}{IMAGE} t9", [A, B]),
        ("t5 t6 t7 t8", []),
    ],
    ids=["one", "another", "resized", "both", "none"],
)
def test_answers_are_those_of_transformers_that_sees_the_same_pixels(vision, ask, text, images):
    urls = [as_url(image) for image in images]
    tokens, answer = ask(text, urls)
    log_probs, likeliest, prompt = vision.log_probs_of(text, urls, answer.tokens)
    assert tokens == prompt
    assert answer.tokens == likeliest
    assert answer.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_what_is_in_the_image_changes_the_answer(ask):
    other = picture(3, width=24, height=32)
    (tokens, first), (same, second) = (ask(TEXT, [as_url(image)]) for image in (A, other))
    assert tokens == same
    assert first.log_probs != pytest.approx(second.log_probs, abs=1e-2)


def test_an_aborted_response_goes_on_with_the_same_images(serving, ask, tokenizer, running, endless):
    tokens = tokenizer.encode_with_images(TEXT, [as_url(A)])
    sample = Sample(index=0, tokens=list(tokens), multimodal_inputs={"image": [as_url(A)]})
    context = GenerateContext(
        engine=serving.engine, tokenizer=tokenizer, capabilities=serving.engine.capabilities
    )

    async def broken():
        work = asyncio.ensure_future(single_turn(context, sample, endless))
        begun = asyncio.ensure_future(running(serving.engine, 1))
        await asyncio.wait({work, begun}, return_when=asyncio.FIRST_COMPLETED)
        assert not work.done(), work.result()
        await serving.engine.abort()
        await work

    serving.run(broken())
    assert sample.status is Status.ABORTED
    n_tokens = sample.response_length
    assert 0 < n_tokens < endless.max_new_tokens
    more = SamplingParams(max_new_tokens=n_tokens + 20, min_new_tokens=n_tokens + 20, temperature=0)
    serving.run(single_turn(context, sample, more))
    assert sample.response_length == n_tokens + 20
    _, unbroken = ask(TEXT, [as_url(A)], more)
    assert sample.response_tokens == unbroken.tokens
    assert sample.rollout_log_probs == pytest.approx(unbroken.log_probs, abs=2e-5)


def test_bytes_that_are_no_image_are_refused_by_the_server(serving, tokenizer):
    tokens = tokenizer.encode_with_images(TEXT, [as_url(A)])
    with pytest.raises(EngineError, match=r"status 400: .*image"):
        serving.run(serving.engine.generate(tokens, GREEDY, images=["data:image;base64,AAAA"]))


def test_held_out_images_are_evaluated(serving, vision, ask, tokenizer, tmp_path):
    rows = []
    for name, image in (("a", A), ("b", B)):
        (tmp_path / f"{name}.png").write_bytes(image)
        _, answer = ask(TEXT, [as_url(image)])
        rows.append(
            {
                "input": "t5 t6 <image> t7 t8",
                "images": [f"{name}.png"],
                "label": tokenizer.decode(answer.tokens, skip_special_tokens=False),
            }
        )
    data = tmp_path / "images.jsonl"
    key = tmp_path / "key"
    key.write_text(serving.engine.key)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "run-name": "seen", "output-dir": tmp_path, "num-rollout": 1, "hf-checkpoint": vision.folder,
        "prompt-data": data, "label-key": "label", "multimodal-keys": '{"image": "images"}',
        "rollout-engine": "sglang", "rollout-external-engine-addrs": serving.engine.url.removeprefix("http://"),
        "rollout-batch-size": 1, "rollout-max-response-len": 12, "rm-type": "exact", "train-backend": "none",
        "eval-interval": 1, "eval-temperature": 0, "sglang-dtype": "float32", "rollout-external-key-file": key,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "slime_core", "eval", *words, "--apply-chat-template"]
    result = subprocess.run(
        [*command, "--eval-prompt-data", "seen", str(data)], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["eval/seen"] == 1.0
    (sample, _) = read_records(tmp_path / "seen-eval/rollouts/eval_step_000000.jsonl")
    assert sample["tokens"][:4] == [5, 6, START, PLACEHOLDER]
    assert sample["multimodal_inputs"] == {"image": [str(tmp_path / "a.png")]}
