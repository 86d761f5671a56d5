"""Whole runs of Megatron's trainer with real SGLang servers: on shared devices, in few bits, and with servers that are lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from .whole_runs import check_whole, metrics, samples

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]


def finish(command: list[str], *flags: str) -> None:
    """Run a command to its end."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "plugins"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, *flags], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def check_same(run: Path, other: Path, *, steps: int) -> None:
    """Check that two runs drew the same tokens, and agree to rounding, which depends on where a server's memory lies."""
    measured = zip(metrics(run)[: steps + 1], metrics(other)[: steps + 1], strict=True)
    assert all(row == pytest.approx(wanted, rel=1e-3, abs=1e-5) for row, wanted in measured)
    for step in range(1, steps + 1):
        for found, wanted in zip(samples(run, step), samples(other, step), strict=True):
            assert (found["index"], found["tokens"]) == (wanted["index"], wanted["tokens"])
            assert found["rollout_log_probs"] == pytest.approx(wanted["rollout_log_probs"], abs=1e-5, rel=0)


def calls(run: Path) -> str:
    """What the run's newest server was asked for, one letter for several in a row: generate (G), offload (F), update (U), and memory
    back (B): that of the weights, or with the next request that of the KV cache."""
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
    sglang_run, kill_after, tmp_path
):
    apart, shared = tmp_path / "runs/apart", tmp_path / "runs/shared"
    finish(sglang_run, "--run-name", "apart")
    check_whole(apart)
    assert calls(apart) == "UGUGUGUGUG"

    sglang_run += ["--run-name", "shared", "--colocate"]
    kill_after(sglang_run, shared / "metrics.jsonl", 3)  # in the last step; a checkpoint is of the second
    turn = "FBUBG"  # the engine offloads, takes the memory of the weights, gets them, takes that of the KV cache, and generates
    whole = 6 * turn + "F"  # after each evaluation comes a checkpoint, and after that the weights once more
    assert whole.startswith(calls(shared))
    assert calls(shared).startswith(4 * turn + "FBU")
    check_same(shared, apart, steps=3)

    finish(sglang_run)
    assert calls(shared) == 3 * turn + "F"
    check_whole(shared)
    check_same(shared, apart, steps=2)


def test_servers_in_few_bits_get_each_update_in_few_bits(sglang_run, slime, qwen3, tmp_path):
    coarse, run = tmp_path / "fp8", tmp_path / "runs/letters"
    quantized = slime("convert", "quantize", qwen3, coarse, "--format", "fp8-block")
    assert quantized.returncode == 0, quantized.stderr
    finish(sglang_run, "--sglang-model-path", str(coarse), "--use-tis")
    check_whole(run, limit=0.1)
    for row in metrics(run)[1:]:
        assert row["train/train_rollout_logprob_abs_diff"] > 1e-4  # they are not the trainer's weights
        assert row["train/tis_abs"] > 0


@pytest.fixture
def chatty(qwen3, tmp_path):
    """The model of letters with a chat template, which joins what was said."""
    folder = shutil.copytree(qwen3, tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    return folder


#: By which a server that hangs is found in a minute.
CHECKS = ("--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "30")


@pytest.mark.parametrize(("generator", "transport"), [("single-turn", "memory"), ("agent", "nccl")])
def test_a_run_that_loses_both_servers_in_turn_ends_with_every_sample_once(
    sglang_run, tmp_path, chatty, generator, transport
):
    run = tmp_path / "runs/letters"
    sglang_run += ["--hf-checkpoint", str(chatty), "--custom-generate-function-path", generator]
    if generator == "agent":
        sglang_run += ["--agents-function", "talking_agents:three_turns"]
    trouble = ["--tracker", "jsonl", "trouble_in_serving:create_tracker"]
    trouble += ["--rollout-function-path", "trouble_in_serving:rollout", "--use-fault-tolerance"]
    more = ["--rollout-num-gpus", "2", "--sglang-server-concurrency", "8", "--rollout-max-response-len", "64"]
    finish(sglang_run, *trouble, *CHECKS, *more, "--update-weight-transport", transport)
    check_whole(run)
    log = (run / "log.txt").read_text()
    assert re.search(
        r"engine 0 is lost, with \d+ requests in flight: the SGLang server ended with status -9", log
    )
    assert "engine 0 serves again, with weights of version 2" in log
    assert "it failed its health check" in log[log.index("engine 1 is lost") :]
    if transport != "memory":
        assert "engine 0 has started again, and waits for weights" in log
        assert re.search(
            r"update to version 3: engine 1 \(.+\) was lost during it; sending it again", log, re.S
        )
    if generator == "agent":
        done = [sample["metadata"]["agent"] for step in range(1, 5) for sample in samples(run, step)]
        assert {(one["turns"], one["ended_by"], str(one["refused"])) for one in done} == {(3, "exit", "{}")}


def test_a_run_whose_trainer_and_servers_offload_in_turn_loses_one_server_and_then_all(
    sglang_run, tmp_path, chatty
):
    """Nobody stages the weights, and the trainer's are off the devices: one server waits for the next update; if none is left, all get them."""
    run = tmp_path / "runs/letters"
    sglang_run += ["--hf-checkpoint", str(chatty), "--offload-train", "--offload-rollout"]
    trouble = [
        "--rollout-function-path",
        "trouble_in_serving:rollout_that_all_leave",
        "--use-fault-tolerance",
    ]
    more = ["--rollout-num-gpus", "2", "--sglang-server-concurrency", "8", "--rollout-max-response-len", "64"]
    finish(sglang_run, *trouble, *CHECKS, *more, "--update-weight-transport", "cuda-ipc")
    check_whole(run)
    log = (run / "log.txt").read_text()
    # The first server comes back before that update or after it, as the second one leaves.
    assert set(re.findall(r"(engine \d) serves again, with weights of version (\d)", log)) == {
        ("engine 0", "2"),
        ("engine 1", "2"),
    }
    assert set(re.findall(r"(engine \d) has started again, and waits for weights", log)) == {
        "engine 0",
        "engine 1",
    }
    served = [samples(run, step) for step in range(1, 5)]
    versions = [{version for each in step for version in each["weight_versions"]} for step in served]
    assert versions == [{"0"}, {"1"}, {"2"}, {"3"}]


@pytest.mark.parametrize("loop", ["one-step-off", "fully-async"])
def test_a_run_that_loses_its_only_server_beside_training_sends_weights_when_another_has_come(
    sglang_run, tmp_path, loop
):
    """Nobody stages the weights: the loop waits for groups, and sends them to the server that waits for weights."""
    run = tmp_path / "runs/letters"
    trouble = ("--tracker", "jsonl", "trouble_in_serving:create_killer", "--use-fault-tolerance")
    long = ("--rollout-max-response-len", "64", "--update-weight-transport", "nccl")
    finish(sglang_run, "--loop", loop, *trouble, *CHECKS, *long)
    log = (run / "log.txt").read_text()
    assert re.search(r"engine 0 is lost, .* the SGLang server ended with status -9", log)
    assert "engine 0 serves again, with weights of version 2" in log
    for row in metrics(run)[
        1:
    ]:  # tokens of the weights that they are trained on have the trainer's log-probs
        name = "train/train_rollout_logprob_abs_diff"
        if f"{name}/on_policy" in row or not row.get("rollout/staleness/max"):
            assert 0 <= row.get(f"{name}/on_policy", row[name]) < 1e-5
    used = Counter(each["index"] for step in range(1, 5) for each in samples(run, step))
    assert used == Counter(range(4 * 4 * 4))
    for step in range(1, 5):
        versions = {int(version) for each in samples(run, step) for version in each["weight_versions"]}
        assert versions <= {step - 2, step - 1}


def test_generate_functions_of_the_reference_system_ask_the_server(sglang_run, tmp_path, root, monkeypatch):
    """The tool's tokens are masked, the others' log-probs are the server's, and the trainer agrees with them."""
    files = root / "plugins/slime-compat/tests/hooks/files"
    monkeypatch.setenv("PYTHONPATH", str(files))
    flags = ["--run-name", "tools", "--num-rollout", "2", "--eval-interval", "none"]
    finish(sglang_run, *flags, "--custom-generate-function-path", "tool_generate.generate")
    run = tmp_path / "runs/tools"
    for row in metrics(run)[-2:]:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-3
    for step in (1, 2):
        for sample in samples(run, step):
            assert sample["weight_versions"] == [str(step - 1)]
            assert sample["loss_mask"].count(0) >= 1
