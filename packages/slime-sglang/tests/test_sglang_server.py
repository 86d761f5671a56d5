"""A real SGLang server on the CPU, against transformers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_sglang.compat import PATCHES
from slime_sglang.server import server_command, server_environment
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

START_S = 300
N_NEW = 12
PROMPTS = [[5, 6, 7, 8], [9], [100, 3, 77, 12, 64, 31, 2]]


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON answer to a request, or fail with the end of the log."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read() or "null")
        except OSError as error:
            pytest.fail(f"{path}: {error}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-4000:]

    def wait_until_ready(self) -> None:
        """Wait for /health, and fail when the process ends or `START_S` passes."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                pass
            try:
                status = self.process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"the server ended with status {status}\n{self.log_tail()}")
        pytest.fail(f"the server was not ready after {START_S} s\n{self.log_tail()}")


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A llama of two layers with random float32 weights, wide enough apart that no two tokens tie."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def server(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of that model on loopback."""
    folder = tmp_path_factory.mktemp("sglang")
    model.save_pretrained(folder / "model")
    port = free_port()
    command = server_command(
        folder / "model",
        port=port,
        dtype="float32",
        device="cpu",
        max_total_tokens=1024,
        max_running_requests=4,
        arguments=["--skip-tokenizer-init"],
    )
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | server_environment(device="cpu")
    )
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        running = Server(process, f"http://127.0.0.1:{port}", log)
        running.wait_until_ready()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def generate(server: Server) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities that the server generates greedily, per prompt."""
    body = {
        "input_ids": PROMPTS,
        "sampling_params": {"temperature": 0, "max_new_tokens": N_NEW, "ignore_eos": True},
        "return_logprob": True,
    }
    replies = server.post("/generate", body)
    return [(r["output_ids"], [lp for lp, *_ in r["meta_info"]["output_token_logprobs"]]) for r in replies]


@torch.no_grad()
def generate_by_transformers(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the same from whole forward passes, one for each token."""
    tokens, log_probs = list(prompt), []
    for _ in range(N_NEW):
        scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return tokens[len(prompt) :], log_probs


def test_greedy_tokens_and_log_probs_are_those_of_transformers(
    server: Server, model: LlamaForCausalLM
) -> None:
    for prompt, (tokens, log_probs) in zip(PROMPTS, generate(server), strict=True):
        wanted_tokens, wanted_log_probs = generate_by_transformers(model, prompt)
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, abs=1e-5, rel=0)


def test_server_survives_release_and_resume_of_memory(server: Server) -> None:
    before = [tokens for tokens, _ in generate(server)]
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    assert [tokens for tokens, _ in generate(server)] == before


def test_weights_are_compared_on_the_cpu(server: Server) -> None:
    server.post("/weights_checker", {"action": "snapshot"})
    assert server.post("/weights_checker", {"action": "compare"})["success"]


def test_every_patch_is_still_needed(server: Server) -> None:
    """Fails when SGLang no longer makes the call, or when PyTorch without a GPU no longer refuses it."""
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    server.post("/weights_checker", {"action": "snapshot"})
    server.post("/weights_checker", {"action": "compare"})
    log = server.log.read_text(errors="replace")
    assert [patch.name for patch in PATCHES if patch.log_line not in log] == []
