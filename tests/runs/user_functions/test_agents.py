"""Whole runs of agents: the trainer's log-prob of each token that is trained on is the engine's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ..test_loop import rows, train
from .test_sample_hooks import samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Two steps over the random llama, in float32; the first changes the weights that the second is generated with.
MODELS = [
    "--tokenizer", "hf", "--rollout-engine", "torch", "--train-backend", "megatron", "--no-bf16", "--lr", "1e-2",
    "--advantage-estimator", "grpo", "--loss-type", "policy_loss", "--loss-reducer", "sample-mean", "--use-tis",
    "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "48",
    "--rm-type", "random", "--eval-interval", "none", "--save-interval", "none", "--no-save-last", "--tracker", "jsonl",
    "--rollout-data-postprocess-path", "talking_agents:tell_log_probs",
]  # fmt: skip
CHATS = (
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "user", "content": "  日本?\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A word, please."}],
    [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}, {"role": "user", "content": "?"}],
)  # fmt: skip


@pytest.fixture
def talk(letters: Path, tiny_llama: Path, capsys, tmp_path: Path):
    """Return a function that trains on chats for two steps, and returns the samples and, of each step, tokens and the largest
    difference of any token's log-probs."""
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text("".join(json.dumps({"input": chat, "label": "?"}) + "\n" for chat in CHATS * 2))

    def talk(*flags: str) -> tuple[list[dict], list[tuple[int, float]]]:
        train(letters, *MODELS, "--hf-checkpoint", str(tiny_llama), "--prompt-data", str(prompts), *flags)
        told = re.findall(r"step \d+: (\d+) tokens, at most (\S+) apart", capsys.readouterr().out)
        return samples(tmp_path / "runs/letters"), [(int(n), float(far)) for n, far in told]

    return talk


def mask(sample: dict) -> list[int]:
    """1 for each token of the response that the policy said."""
    return sample["loss_mask"] or [1] * sample["response_length"]


def check_agrees(done: list[dict], told: list[tuple[int, float]], tmp_path: Path) -> None:
    """Check that every token that the policy said was compared, after weights that changed, and is as the engine has it."""
    assert len(told) == 2
    assert sum(n for n, _ in told) == sum(sum(mask(one)) for one in done)
    assert max(far for _, far in told) <= 1e-5
    assert {version for one in done for version in one["weight_versions"]} == {"0", "1"}
    assert rows(tmp_path / "runs/letters")[0]["train/grad_norm"] > 0


def test_log_probs_of_tapes_with_results_and_forks_are_the_trainers(talk, tmp_path):
    flags = ["--custom-generate-function-path", "agent", "--agents-reward", "program", "--rm-type", "none"]
    done, told = talk(*flags, "--agents-function", "talking_agents:results_and_forks")
    check_agrees(done, told, tmp_path)
    # Each session is two samples: the talk, and what its change of the history began.
    assert len(done) == 2 * 4 * 2 * 2
    texts = [one["response"] for one in done]
    assert sum("It is 21 °C." in text and "日本\n\n  twice" in text for text in texts) == 16
    assert {one["reward"] for one in done} == {0.0, 1.0}
    assert {one["metadata"]["agent"]["turns"] for one in done} == {4}


def test_log_probs_of_a_tool_loop_are_the_trainers(talk, tmp_path):
    tools = {"look": {"kind": "python", "function": "talking_agents:look"}}
    flags = ["--custom-generate-function-path", "tool-loop", "--agents-tools", json.dumps(tools)]
    flags += ["--agents-tool-format", "talking_agents:EachTurnCalls", "--agents-max-turns", "3"]
    done, told = talk(*flags, "--rollout-stop", "u")  # a random model does not end a turn by itself
    check_agrees(done, told, tmp_path)
    assert len(done) == 2 * 4 * 2
    answered = [one["response"].count("It is 21 °C.\n\n日本") for one in done]
    assert max(answered) >= 2
    assert all(0 in mask(one) for one, n in zip(done, answered, strict=True) if n)
