"""Launcher `ray`: ranks in processes of their own learn what one process learns; whatever ends one of them ends the run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_bench.batches import WAYS, batches
from slime_core.checks.settings import check_settings
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, DataError, DeadlineError, TrainerError
from slime_core.launch.local import assemble_and, drive, launch
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build
from slime_core.rundir.events import read_events

from ..servers.attacked import writers_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RANKS = ("--launcher", "ray", "--actor-num-gpus-per-node", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start Ray for all tests; returns the address. Runs in this process use it as it is, others join it."""
    from slime_ray.launcher import set_environment

    set_environment()
    import ray
    from slime_ray.placement.cluster import connect

    connect(2)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def train(letters: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that trains the policy of letters, by default on two ranks of Ray, and returns the summary."""
    monkeypatch.syspath_prepend(root / "tests/plugins")
    registry = Registry()

    def train(*flags: str, ranks: tuple[str, ...] = RANKS) -> dict[str, Any]:
        backend = ("--train-backend", "letters.ranked:create_trainer")
        settings = load_settings([str(letters)], [*backend, *ranks, *flags], registry=registry)
        if not ranks:
            return launch(settings, registry, drive)
        from slime_ray.trainer.trainer import OnRay

        return asyncio.run(assemble_and(drive, settings, registry, placement=OnRay()))

    return train


def steps(run: Path) -> list[dict[str, float]]:
    """Metrics of each step, without those of time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.faults
def test_error_of_a_rank_names_it_and_the_resumed_run_learns_what_one_process_learns(
    cluster, train, tmp_path
):
    run = tmp_path / "runs/ray"
    with pytest.raises(Exception, match="step 3: this rank has had enough") as caught:
        train("--run-name", "ray", "--save-interval", "1", "--train-env-vars", '{"TROUBLE": "raise"}')
    assert type(caught.value) is TrainerError  # the rank's class takes two arguments: it cannot be unpickled
    assert "NoMore: step 3" in str(caught.value)
    assert caught.value.__notes__[0].startswith("raised on rank 1 of 2 (process ")
    assert "in misbehave" in str(caught.value.__cause__)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert "in misbehave" in (run / "log.txt").read_text()
    assert "in misbehave" in (run / "ranks/rank_001.log").read_text()
    assert writers_below(tmp_path) == []

    assert train("--run-name", "ray")["status"] == "completed"
    train("--run-name", "local", ranks=())
    local, ray = steps(tmp_path / "runs/local"), steps(run)
    assert [row.pop("train/ranks", None) for row in ray] == [None, *[2.0] * 12]
    assert [row.pop("train/ranks", None) for row in local] == [None, *[1.0] * 12]
    assert ray == local
    lanes = [
        (one["step"], one["lane"]) for one in read_events(run / "events.jsonl") if one["name"] == "meeting"
    ]
    assert sorted(lanes) == [(step, f"rank {rank}") for step in range(1, 13) for rank in (0, 1)]
    assert writers_below(tmp_path) == []


@pytest.mark.faults
@pytest.mark.slow
def test_bench_of_batches_says_how_fast_every_rank_has_one(cluster, capsys):
    assert batches(["--mebibytes", "1", "--repeats", "1"]) == 0  # rank 0 has read what it was given
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads == "batch of 1 MiB to 2 ranks; median of 1 (lowest to highest)"
    assert [row.split("  ")[0] for row in rows[1:]] == list(WAYS)


@pytest.mark.faults
def test_rank_that_hangs_is_named_when_the_deadline_has_passed_and_killed(cluster, train, tmp_path):
    with pytest.raises(DeadlineError, match=r"step 3: training: not done after 10 s") as caught:
        train("--train-env-vars", '{"TROUBLE": "stop"}', "--train-timeout-s", "10")
    (note,) = caught.value.__notes__
    waiting, stopped, ends = note.removeprefix("no answer to train from ").split("; ")
    assert waiting.startswith("rank 0 of 2 (process ")
    assert re.search(r"at .+letters/ranked\.py:\d+ in _meet$", waiting)
    assert stopped.startswith("rank 1 of 2 (process ")
    assert "which does not say where it is" in stopped
    assert ends == "stacks of both ends are in the log"
    log = (tmp_path / "runs/letters/log.txt").read_text()
    assert re.search(
        r"step 3: training: not done after 10 s; this process was at\n(.*\n)*thread MainThread:", log
    )
    assert re.search(r"rank 0 of 2 \(.*\) was at\n(.*\n)*.*letters/ranked\.py\", line \d+ in _meet", log)
    assert writers_below(tmp_path) == []


@pytest.mark.faults
def test_driver_that_is_killed_leaves_no_rank_on_a_cluster_that_goes_on(
    cluster, train, letters, kill_after, monkeypatch, root, tmp_path
):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    )
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *RANKS, "--num-rollout", "5000"]
    command += ["--ray-device", "cpu"]
    command += ["--train-backend", "letters.ranked:create_trainer"]
    kill_after(command, tmp_path / "runs/letters/metrics.jsonl", 3)
    deadline = time.monotonic() + 30
    while left := writers_below(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert train("--run-name", "next", "--num-rollout", "2")["status"] == "completed"


@pytest.mark.faults
def test_cluster_that_is_too_small_is_refused_at_once(cluster, train):
    with pytest.raises(ConfigError, match=r"found 2 x 3, and a Ray cluster whose machines have 2 CPUs"):
        train(ranks=("--launcher", "ray", "--actor-num-gpus-per-node", "3", "--actor-num-nodes", "2"))


@pytest.mark.faults
def test_cluster_without_gpus_is_refused_unless_the_cpu_is_asked_for(cluster, slime, letters):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    refused = slime("train", str(letters), "--launcher", "ray", "--ray-address", cluster, env=env)
    assert refused.returncode == 2
    wanted = (
        "ray.device: found a Ray cluster that has no GPUs; wanted a cluster with GPUs; give --ray-device cpu"
    )
    assert wanted in refused.stderr
    no_gpus = slime("train", str(letters), "--launcher", "ray", "--ray-device", "gpu", env=env)
    assert no_gpus.returncode == 2
    assert wanted in no_gpus.stderr


def all_is_given_back() -> bool:
    import ray

    free, whole = ray.available_resources(), ray.cluster_resources()
    return free.get("CPU") == whole["CPU"]


def groups_asked_for() -> int:
    from ray.util.placement_group import placement_group_table

    return len(placement_group_table())


@pytest.mark.faults
def test_data_that_is_refused_once_ranks_were_begun_leaves_nothing_on_the_cluster(cluster, train, tmp_path):
    import ray

    before = groups_asked_for()
    (tmp_path / "broken.jsonl").write_text('{"input": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl"):
        train("--prompt-data", str(tmp_path / "broken.jsonl"))
    assert groups_asked_for() == before + 1  # ranks were begun
    deadline = time.monotonic() + 60
    while not all_is_given_back():
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)
    assert not (tmp_path / "runs").exists()


@pytest.mark.faults
def test_settings_that_do_not_fit_are_refused_before_anything_is_asked_of_the_cluster(cluster, train):
    before = groups_asked_for()
    with pytest.raises(ConfigError, match="found 9999; wanted ids of the vocabulary"):
        train("--rollout-stop-token-ids", "9999")
    assert groups_asked_for() == before


def test_what_ranks_cannot_do_is_refused_before_anything_starts(letters):
    registry = Registry()
    one_process = load_settings([str(letters)], RANKS, registry=registry)
    assert check_settings(one_process, registry) == []
    with pytest.raises(
        ConfigError, match=r"found 2 with the trainer .*create_trainer'; wanted 1: this trainer is one"
    ):
        make_build(one_process, registry)
    local = load_settings([str(letters)], [*RANKS[2:], "--train-env-vars", '{"A": "1"}'], registry=registry)
    assert [problem.wanted for problem in check_settings(local, registry)] == [
        "1: launcher local is one process",
        "nothing: it starts no process of the trainer",
    ]
    unread = load_settings(
        [str(letters)], ["--num-gpus-per-node", "8", "--ray-device", "cpu"], registry=registry
    )
    assert [problem.wanted for problem in check_settings(unread, registry)] == [
        "nothing: it reserves no machine"
    ]
    assert [problem.wanted for problem in unread_flags([unread], registry)] == [
        "--launcher ray, or not this flag"
    ]


def test_layout_that_the_model_does_not_allow_is_found_before_anything_starts(root, tiny_llama):
    registry = Registry()
    flags = ["--hf-checkpoint", str(tiny_llama), *RANKS[:3], "12", "--tensor-model-parallel-size", "12"]
    settings = load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry)
    assert check_settings(settings, registry) == []
    with pytest.raises(ConfigError) as caught:
        make_build(settings, registry)
    assert [str(problem) for problem in caught.value.problems] == [
        "megatron.tensor_model_parallel_size: found 12; wanted a divisor of 4, the model's attention heads",
        "megatron.tensor_model_parallel_size: found 12; wanted a divisor of 2, the model's query groups",
    ]


@pytest.mark.faults
def test_megatron_on_two_ranks_equals_one_process_until_a_rank_dies_in_a_collective(
    cluster, slime, root, tiny_llama, tmp_path
):
    common = [
        "--hf-checkpoint", str(tiny_llama), "--output-dir", str(tmp_path), "--num-rollout", "3", "--tracker", "jsonl",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16", "--no-bf16",
        "--lr", "1e-3", "--rm-type", "slime_bench.step.work:parity", "--num-steps-per-rollout", "2",
        "--skip-eval-before-train", "--eval-interval", "5",
    ]  # fmt: skip
    recipe = str(root / "recipes/quickstart.toml")
    env = os.environ | {"PYTHONPATH": str(root / "tests/plugins"), "RAY_ADDRESS": cluster}
    on_cpu = ("--ray-device", "cpu")
    hook = ("--custom-megatron-before-train-step-hook-path", "trouble_in_training:die")
    saves = ("--save-interval", "1", "--async-save")
    killed = slime("train", recipe, *common, *RANKS, *on_cpu, *hook, *saves, "--run-name", "ray", env=env)
    assert killed.returncode == 1, killed.stdout + killed.stderr
    first, message, *_ = killed.stderr[killed.stderr.index("slime train: ") :].splitlines()
    assert first == "slime train: RankDied"
    assert message.startswith("  rank 1 of 2 (process ")
    assert "died during train" in message
    summary = json.loads((tmp_path / "ray/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert writers_below(tmp_path) == []
    assert (tmp_path / "ray/checkpoints/step_000001/trainer/trainer.json").exists()
    assert list((tmp_path / "ray/checkpoints").glob(".tmp*")) == []
    registry = Registry()
    settings = load_settings([recipe], [*common, "--run-name", "local"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    local, ray = steps(tmp_path / "local")[:2], steps(tmp_path / "ray")
    assert [row["step"] for row in ray] == [1, 2]
    for ours, theirs in zip(ray, local, strict=True):
        for row in (ours, theirs):  # several differ by the last bit, and each of them may be the worst
            del row["train/train_rollout_logprob_abs_diff/worst_sample_index"]
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert all(row["train/grad_norm"] > 1e-3 for row in local)
