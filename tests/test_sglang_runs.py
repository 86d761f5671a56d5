"""Whole runs of Megatron's trainer with real SGLang servers: on shared devices, in few bits, and with servers that are lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from slime_core.testing.tabular import EOS, VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3 over letters, whose projections are blocks of 128 by 128."""
    folder = tmp_path_factory.mktemp("letters-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = WordLevel({chr(97 + i): i for i in range(EOS)} | {"end": EOS}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture
def command(letters: Path, qwen3: Path) -> list[str]:
    """Trains it for four steps, in float32.

    One request at a time draws from the server's own random numbers: the same ones in each run, without seeds, which
    SGLang does not heed on a CPU.
    """
    flags = {
        "hf-checkpoint": qwen3, "rollout-engine": "sglang", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "rm-type": "slime_bench.step:parity", "lr": "1e-3",
        "num-rollout": 4, "n-samples-per-prompt": 4, "rollout-max-response-len": 6, "eval-interval": 2, "save-interval": 2,
        "sglang-max-total-tokens": 4096, "sglang-max-running-requests": 4, "sglang-server-concurrency": 1,
        "sglang-random-seed": 7,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "slime_core", "train", str(letters), "--no-bf16", *words]


def finish(command: list[str], *flags: str) -> None:
    """Run a command to its end."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, *flags], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def metrics(run: Path) -> list[dict[str, float]]:
    """What was measured of each step, and of the evaluation before them, but for times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def samples(run: Path, step: int) -> list[dict]:
    lines = (run / f"rollouts/step_{step:06}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_same(run: Path, other: Path, *, steps: int) -> None:
    """Check that two runs drew the same tokens, and agree to rounding, which depends on where a server's memory lies."""
    measured = zip(metrics(run)[: steps + 1], metrics(other)[: steps + 1], strict=True)
    assert all(row == pytest.approx(wanted, rel=1e-3, abs=1e-5) for row, wanted in measured)
    for step in range(1, steps + 1):
        for found, wanted in zip(samples(run, step), samples(other, step), strict=True):
            assert (found["index"], found["tokens"]) == (wanted["index"], wanted["tokens"])
            assert found["rollout_log_probs"] == pytest.approx(wanted["rollout_log_probs"], abs=1e-5, rel=0)


def check_whole(run: Path, *, limit: float = 1e-5) -> None:
    """Check that every step is there, each sample once, from the newest weights, and that trainer and servers agree."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(0 <= row["train/train_rollout_logprob_abs_diff"] < limit for row in rows[1:])
    assert all("eval/letters" in rows[number] for number in (0, 2, 4))
    assert len({row["train/grad_norm"] for row in rows[1:]} - {0.0}) == 4  # each step learns
    for step in range(1, 5):
        assert {version for each in samples(run, step) for version in each["weight_versions"]} == {
            str(step - 1)
        }
    used = Counter(each["index"] for step in range(1, 5) for each in samples(run, step))
    assert used == Counter(range(4 * 4 * 4))


def calls(run: Path) -> str:
    """What the run's newest server was asked for, one letter for several in a row: generate, offload, onload, update."""
    of_path = {
        "generate": "G",
        "flush_cache": "f",
        "release_memory_occupation": "R",
        "resume_memory_occupation": "B",
        "pause_generation": "p",
        "begin_weight_update": "b",
        "update_weights_from_tensor": "u",
        "end_weight_update": "e",
        "continue_generation": "c",
    }
    log = (run / "sglang/server.log").read_text(errors="replace")
    letters = "".join(of_path[path] for path in re.findall(rf'"POST /({"|".join(of_path)})\b', log))
    return re.sub("G+", "G", letters).replace("pbuuec", "U").replace("fR", "F")


def test_on_shared_devices_a_run_is_the_same_run_and_one_that_is_killed_goes_on(
    command, kill_after, tmp_path
):
    apart, shared = tmp_path / "runs/apart", tmp_path / "runs/shared"
    finish(command, "--run-name", "apart")
    check_whole(apart)
    assert calls(apart) == "UGUGUGUGUG"

    command += ["--run-name", "shared", "--colocate"]
    kill_after(command, shared / "metrics.jsonl", 3)  # in the last step; a checkpoint is of the second
    whole = "UGFBUGFBUGFBUGFBUGFBUGF"  # after each evaluation comes a checkpoint, and after that the weights once more
    assert whole.startswith(calls(shared)[: len("UGFBUGFBUGFBUGFBU")])
    assert len(calls(shared)) >= len("UGFBUGFBUGFBUGFBU")
    check_same(shared, apart, steps=3)

    finish(command)
    assert calls(shared) == "UGFBUGFBUGF"
    check_whole(shared)
    check_same(shared, apart, steps=2)


def test_servers_in_few_bits_get_each_update_in_few_bits(command, slime, qwen3, tmp_path):
    coarse, run = tmp_path / "fp8", tmp_path / "runs/letters"
    quantized = slime("convert", "quantize", qwen3, coarse, "--format", "fp8-block")
    assert quantized.returncode == 0, quantized.stderr
    finish(command, "--sglang-model-path", str(coarse), "--use-tis")
    check_whole(run, limit=0.1)
    for row in metrics(run)[1:]:
        assert row["train/train_rollout_logprob_abs_diff"] > 1e-4  # they are not the trainer's weights
        assert row["train/tis_abs"] > 0


def test_a_run_that_loses_both_servers_in_turn_ends_with_every_sample_once(command, tmp_path):
    run = tmp_path / "runs/letters"
    trouble = ["--tracker", "jsonl", "trouble_in_serving:create_tracker"]
    trouble += ["--rollout-function-path", "trouble_in_serving:rollout", "--use-fault-tolerance"]
    checks = ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "30"]
    more = ["--rollout-num-gpus", "2", "--sglang-server-concurrency", "8", "--rollout-max-response-len", "64"]
    finish(command, *trouble, *checks, *more)
    check_whole(run)
    log = (run / "log.txt").read_text()
    assert re.search(
        r"engine 0 is lost, with \d+ requests under way: the SGLang server ended with status -9", log
    )
    assert "engine 0 serves again, with weights of version 2" in log
    assert "it failed its health check" in log[log.index("engine 1 is lost") :]
