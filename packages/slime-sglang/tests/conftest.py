"""One real SGLang server on the CPU for all tests, driven through the engine, and the model that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import RolloutEngine, SamplingParams
from slime_core.run.build import make_build
from slime_models.family.families.llama import LLAMA
from slime_sglang.engine import SglangEngine
from slime_sglang.factory import create_engine
from slime_sglang.generation.response import PartialResponse
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.receiver import create_receiver
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .fake_fleet import run_fleet

VOCAB, EOS = 128, 127
SERVER_ARGS = {"max_total_tokens": 65536, "max_running_requests": 4, "stream_interval": 4}
#: What takes minutes, and is ended by whoever asks for it: a request that is in flight for as long as a test wants.
ENDLESS = SamplingParams(max_new_tokens=15000, min_new_tokens=15000, temperature=0)


class Serving:
    """An engine and the event loop, on a thread of its own, that it lives on."""

    def __init__(self, engine: RolloutEngine, *, log: Path, staging: Path) -> None:
        self.engine, self.log, self.staging = engine, log, staging
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any], *, timeout_s: float = 400) -> Any:
        """Run a coroutine on the loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Call the server itself."""
        return self.run(self.engine._client.post(path, body, timeout_s=60))


def _tiny_llama(seed: int) -> LlamaForCausalLM:
    """A llama of two layers with random float32 weights, wide enough apart that no two tokens tie."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def _new_engine(
    model_path: Path, folder: Path, *, address: str | None = None, key: str | None = None, **settings: Any
) -> SglangEngine:
    section = SglangSection(**{"server_args": SERVER_ARGS, "start_timeout_s": 600, **settings})
    receiver = create_receiver(
        model_path,
        LLAMA,
        dtype="float32",
        section=section,
        registry=Registry(),
        disk_dir=folder / "weights",
    )
    return SglangEngine(
        ServerSettings(
            model_path=model_path, dtype="float32", section=section, folder=folder, address=address, key=key
        ),
        receiver=receiver,
    )


@torch.no_grad()
def _log_probs_of(
    model: LlamaForCausalLM,
    prompt: list[int],
    tokens: list[int],
    *,
    temperature: float = 1.0,
    can_end: bool = True,
) -> tuple[list[float], list[int]]:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    if not can_end:
        logits[:, EOS] = -torch.inf
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return log_probs.tolist(), logits.argmax(-1).tolist()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[[int], LlamaForCausalLM]:
    """Makes the model of a seed."""
    return _tiny_llama


@pytest.fixture(scope="session")
def new_engine() -> Callable[..., SglangEngine]:
    """Makes an engine that is not started, from a model's folder, a folder for the log, and settings."""
    return _new_engine


@pytest.fixture(scope="session")
def log_probs_of() -> Callable[..., tuple[list[float], list[int]]]:
    """Log-probs of tokens after a prompt, and the likeliest token at each place, by one pass of transformers.

    `can_end=False` forbids the token that ends a response, as SGLang does under `min_new_tokens`.
    """
    return _log_probs_of


@torch.no_grad()
def _shortfalls_of(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> list[float]:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logits[:, EOS] = -torch.inf
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logits.amax(-1) - chosen).tolist()


@pytest.fixture(scope="session")
def shortfalls_of() -> Callable[[LlamaForCausalLM, list[int], list[int]], list[float]]:
    """How much less likely each token is than the likeliest, in nats, of a response that must not end yet."""
    return _shortfalls_of


@pytest.fixture(scope="session")
def endless() -> SamplingParams:
    """Of a greedy request that a test has to end."""
    return ENDLESS


@pytest.fixture(scope="session")
def in_flight() -> Callable[..., Coroutine[Any, Any, None]]:
    """Returns once a response has some tokens, which a stream brings; or so many at least."""

    async def wait(response: PartialResponse, n_tokens: int = 1) -> None:
        while len(response.completion("none").tokens) < n_tokens:
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def running() -> Callable[[SglangEngine, int], Coroutine[Any, Any, None]]:
    """Returns once a server runs so many requests, by its own count, and each has a token."""

    async def wait(engine: SglangEngine, n_requests: int) -> None:
        while (await loads(engine))["num_running_reqs"] != n_requests:
            await asyncio.sleep(0.05)
        await engine.generate(
            [1, 2, 3], SamplingParams(max_new_tokens=4, temperature=0)
        )  # all take these steps

    return wait


async def loads(engine: SglangEngine) -> dict[str, Any]:
    """What a server counts of its requests, now and then."""
    (counted,) = (await engine._client.get("/v1/loads", timeout_s=60))["loads"]
    return counted


@pytest.fixture(scope="session")
def shared_memory_of() -> Callable[[Path], tuple[str, set[str]]]:
    """Name of the scratch folder of a server's processes, by their log or its folder, and their files in shared memory."""

    def read(log: Path) -> tuple[str, set[str]]:
        scratch, files = set[str](), set[str]()
        for output in Path("/proc").glob("[0-9]*/fd/1"):
            process = output.parents[1]
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if output.readlink().is_relative_to(log):
                    scratch |= set(
                        re.findall("SLIME_SERVER_SCRATCH=([^\0]+)", (process / "environ").read_text())
                    )
                    files |= set(
                        re.findall(r" /dev/shm/(\S+)$", (process / "maps").read_text(), re.MULTILINE)
                    )
        (folder,) = scratch
        return Path(folder).name, files

    return read


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """The model that servers start with."""
    return _tiny_llama(0)


@pytest.fixture(scope="session")
def model_path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder; id i is the word `ti`."""
    folder = tmp_path_factory.mktemp("sglang-model")
    model.save_pretrained(folder)
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=f"t{EOS}").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def serving_of() -> Callable[..., Iterator[Serving]]:
    """Starts an engine, yields it with its event loop, and closes it."""

    def start(engine: RolloutEngine, *, log: Path, staging: Path) -> Iterator[Serving]:
        serving = Serving(engine, log=log, staging=staging)
        serving.run(engine.start(), timeout_s=620)
        yield serving
        serving.run(engine.close())

    return start


@pytest.fixture(scope="session")
def served_by_flags(serving_of: Callable[..., Iterator[Serving]]) -> Callable[..., Iterator[Serving]]:
    """Starts what a run's flags ask for: a float32 model, and the run in a folder of its own."""

    def start(model_path: Path, folder: Path, flags: dict[str, Any], *switches: str) -> Iterator[Serving]:
        flags = {
            "hf-checkpoint": model_path,
            "rollout-engine": "sglang",
            "rollout-batch-size": 1,
            "rollout-max-response-len": 8,
            "output-dir": folder,
            "sglang-dtype": "float32",
            "sglang-staging-dir": folder,
            **flags,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        registry = Registry.from_environment()
        build = make_build(load_settings([], [*words, *switches], registry=registry), registry)
        yield from serving_of(create_engine(build), log=build.run_dir / "sglang", staging=folder)

    return start


@pytest.fixture(scope="session")
def living() -> Callable[[int], list[list[str]]]:
    """What /proc says of the members of a process group that have not ended."""

    def read(group: int) -> list[list[str]]:
        stats = [stat.read_text().rpartition(")")[2].split() for stat in Path("/proc").glob("[0-9]*/stat")]
        return [stat for stat in stats if int(stat[2]) == group and stat[0] != "Z"]

    return read


@pytest.fixture(scope="session")
def serving(
    serving_of: Callable[..., Iterator[Serving]], model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A started engine. Whoever updates its weights brings those of `model` back."""
    folder = tmp_path_factory.mktemp("sglang-server")
    staging = tmp_path_factory.mktemp("sglang-staging")
    engine = _new_engine(model_path, folder, staging_dir=staging, server_concurrency=4)
    yield from serving_of(engine, log=folder / "server.log", staging=staging)


@pytest.fixture
def fleet_of(model_path: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a scenario with a fleet over fake workers; see `run_fleet`."""
    return partial(run_fleet, model_path, tmp_path)
