"""Reference and teacher in processes of their own: on GPUs that the policy has not, with the numbers that they have among its ranks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.launch.local import assemble_and, drive
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build
from slime_core.rundir.events import read_events

from ..servers.attacked import writers_below

pytestmark = pytest.mark.timeout(1200)

RAY = ("--launcher", "ray", "--ray-device", "cpu", "--actor-num-gpus-per-node", "2")


@pytest.fixture
def train(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the quickstart's recipe in this process, by either launcher, and returns the summary."""
    from slime_ray.trainer.trainer import OnRay

    monkeypatch.syspath_prepend(root / "tests/plugins")
    registry, recipe = Registry.from_environment(), root / "recipes/quickstart.toml"

    def train(*flags: str) -> dict[str, Any]:
        settings = load_settings([str(recipe)], flags, registry=registry)
        placement = OnRay() if settings.run.launcher == "ray" else None
        return asyncio.run(assemble_and(drive, settings, registry, placement=placement))

    return train


@pytest.fixture(scope="module")
def teacher(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the tiny llama's architecture and tokenizer, with other weights."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_llama, folder)
    model, generator = AutoModelForCausalLM.from_pretrained(tiny_llama), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.02).to(parameter.dtype))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def common(tiny_llama: Path, teacher: Path, tmp_path: Path) -> tuple[str, ...]:
    """PPO with a critic, a KL term of a reference that is the teacher's mother, and on-policy distillation."""
    return (
        "--hf-checkpoint", str(tiny_llama), "--output-dir", str(tmp_path), "--num-rollout", "4", "--tracker", "jsonl",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--no-bf16",
        "--lr", "1e-3", "--rm-type", "slime_bench.step.work:parity", "--num-steps-per-rollout", "2",
        "--eval-interval", "none", "--save-interval", "1", "--keep-checkpoints", "4",
        "--advantage-estimator", "ppo", "--lambd", "0.9", "--critic-lr", "1e-2", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "low_var_kl",
        "--ref-load", str(tiny_llama), "--use-opd", "--opd-teacher-load", str(teacher),
    )  # fmt: skip


def steps(run: Path) -> list[dict[str, float]]:
    """Metrics of each step, without those of time, and without which of several that differ by the last bit is the worst."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/") and not k.endswith("worst_sample_index")}
        for row in rows
    ]


def spans(run: Path, name: str, lane: str) -> list[tuple[float, float]]:
    """(begin, end) of the spans of a name in a lane."""
    found = [
        one for one in read_events(run / "events.jsonl") if one["name"] == name and one.get("lane") == lane
    ]
    return [(one["begin"], one["begin"] + one["seconds"]) for one in found]


@pytest.mark.faults
@pytest.mark.slow
def test_models_apart_give_the_numbers_that_they_give_in_the_policys_ranks_also_after_one_died(
    one_node, train, common, tmp_path
):
    assert train(*common, "--run-name", "local")["status"] == "completed"
    local = steps(tmp_path / "local")
    assert [row["step"] for row in local] == [1, 2, 3, 4]
    assert all(row["train/opd_reverse_kl"] != 0 and row["train/grad_norm"] > 1e-4 for row in local)
    assert all(row["train/kl_loss"] > 1e-7 for row in local)

    pool = (*RAY, "--ref-num-gpus-per-node", "2")
    hook = ("--custom-megatron-before-log-prob-hook-path", "trouble_in_training:before_log_prob")
    trouble = ("--train-env-vars", json.dumps({"DIES_IN": "3"}), *hook)
    with pytest.raises(Exception, match=r"reference rank 1 of 2 \(process .* died during begin") as caught:
        train(*common, *pool, *trouble, "--run-name", "two")
    assert type(caught.value).__name__ == "RankDied"
    assert writers_below(tmp_path) == []
    assert json.loads((tmp_path / "two/summary.json").read_text())["steps"] == 2
    described = json.loads((tmp_path / "two/checkpoints/step_000002/trainer/trainer.json").read_text())
    assert described["roles"] == []
    assert train(*common, *pool, "--run-name", "two")["status"] == "completed"

    both = (*RAY, "--critic-num-gpus-per-node", "1", "--ref-num-nodes", "1", "--ref-num-gpus-per-node", "1")
    assert train(*common, *both, "--run-name", "one")["status"] == "completed"
    for name in ("two", "one"):
        for ours, theirs in zip(steps(tmp_path / name), local, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert all(
            row["perf/ref_log_probs_time"] > 0 and row["perf/teacher_log_probs_time"] > 0 for row in rows
        )
        assert all(row["perf/pools_wait_time"] >= 0 for row in rows)
    for run, lanes in (("two", ("rank 2", "rank 3")), ("one", ("rank 3",))):
        policy = spans(tmp_path / run, "log_probs", "rank 0")
        for lane in lanes:
            reference, last = (
                spans(tmp_path / run, "ref_log_probs", lane),
                spans(tmp_path / run, "teacher_log_probs", lane),
            )
            assert len(policy) == len(reference) == len(last) == 4
            for (begin, end), (first, _), (_, until) in zip(policy, reference, last, strict=True):
                assert first < end and begin < until  # at the same time


def test_what_cannot_have_a_reference_apart_is_refused_before_anything_starts(letters, root, tiny_llama):
    registry, pool = Registry.from_environment(), ("--ref-num-nodes", "1", "--ref-num-gpus-per-node", "2")
    local = load_settings([str(letters)], pool, registry=registry)
    wanted = "wanted nothing: it has one process, with all roles; give --launcher ray"
    assert [str(problem) for problem in check_settings(local, registry)] == [
        f"cluster.ref_num_nodes: found 1 with launcher local; {wanted}",
        f"cluster.ref_num_gpus_per_node: found 2 with launcher local; {wanted}",
    ]
    settings = load_settings([str(letters)], ("--launcher", "ray", *pool), registry=registry)
    with pytest.raises(
        ConfigError, match=r"found 2 with the trainer .*; wanted neither: this trainer has no ref that could"
    ):
        make_build(settings, registry)
    flags = ["--hf-checkpoint", str(tiny_llama), "--launcher", "ray", *pool]
    settings = load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry)
    with pytest.raises(ConfigError) as caught:
        make_build(settings, registry)
    assert [str(problem) for problem in caught.value.problems] == [
        "cluster.ref_num_nodes x cluster.ref_num_gpus_per_node: found them with an estimator and a loss that read log-probs of no "
        "reference, and of no teacher that has a folder; wanted something for these ranks to compute; give --use-kl-loss or --kl-coef, "
        "or --use-opd and --opd-teacher-load, or leave them out"
    ]
