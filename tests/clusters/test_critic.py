"""A critic in processes of its own: on GPUs that the policy has not, with the numbers that it has among the policy's ranks."""

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

POOL = ("--launcher", "ray", "--actor-num-gpus-per-node", "4", "--critic-num-gpus-per-node", "4")
LETTERS = (
    *("--train-backend", "letters.pooled:create_trainer", "--rollout-engine", "letters.placed:create_engine"),
    *("--eval-interval", "none", "--num-rollout", "4", "--save-interval", "1"),
)


@pytest.fixture
def train(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that trains by the launcher `ray` in this process, and returns the summary."""
    from slime_ray.trainer.trainer import OnRay

    monkeypatch.syspath_prepend(root / "tests/plugins")
    monkeypatch.setenv("SERVERS", "[]")
    registry = Registry.from_environment()

    def train(recipe: Path, *flags: str) -> dict[str, Any]:
        settings = load_settings([str(recipe)], flags, registry=registry)
        return asyncio.run(assemble_and(drive, settings, registry, placement=OnRay()))

    return train


def steps(run: Path) -> list[dict[str, float]]:
    """Metrics of each step, without those of time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.faults
@pytest.mark.slow
def test_critic_has_gpus_of_its_own_and_one_that_dies_ends_the_run_by_name_until_it_is_resumed(
    one_node, train, letters, tmp_path
):
    run = tmp_path / "runs/letters"
    trouble = ("--train-env-vars", '{"CRITICS_TROUBLE": "die"}')
    with pytest.raises(Exception, match=r"critic rank 1 of 4 \(process .* died during learn") as caught:
        train(letters, *LETTERS, *POOL, *trouble)
    assert type(caught.value).__name__ == "RankDied"
    assert writers_below(tmp_path) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    logs = [(run / f"ranks/rank_{number:03}.log").read_text() for number in range(8)]
    seen = [json.loads(next(line for line in log.splitlines() if '"rank"' in line)) for log in logs]
    assert [one["rank"] for one in seen] == [*range(4)] * 2
    assert [one["gpus"] for one in seen] == [one["given"] for one in seen] == list("01234567")

    assert train(letters, *LETTERS, *POOL)["status"] == "completed"
    rows = steps(run)
    assert [row["train/ranks"] for row in rows] == [row["train/critic/ranks"] for row in rows] == [4.0] * 4
    value, values = 0.0, []
    for row in rows:  # the critic's number goes on where it was when the rank died
        values.append(value)
        value += 0.5 * (row["rollout/raw_reward"] - value)
    assert [row["train/value"] for row in rows] == pytest.approx(values, abs=1e-6)
    lanes = {(one["name"], one["lane"]) for one in read_events(run / "events.jsonl") if "lane" in one}
    assert {lane for name, lane in lanes if name == "criticism"} == {f"rank {i}" for i in range(4, 8)}
    assert {lane for name, lane in lanes if name == "meeting"} == {f"rank {i}" for i in range(4)}


def test_what_cannot_have_a_critic_apart_is_refused_before_anything_starts(letters, root, tiny_llama):
    registry = Registry.from_environment()
    local = load_settings([str(letters)], POOL[4:], registry=registry)
    assert [str(problem) for problem in check_settings(local, registry)] == [
        "cluster.critic_num_gpus_per_node: found 4 with launcher local; wanted nothing: it has one process, with all roles; "
        "give --launcher ray"
    ]
    settings = load_settings([str(letters)], POOL, registry=registry)
    with pytest.raises(
        ConfigError, match=r"found 4 with the trainer .*; wanted neither: this trainer has no"
    ):
        make_build(settings, registry)
    flags = ["--hf-checkpoint", str(tiny_llama), *POOL]
    settings = load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry)
    with pytest.raises(ConfigError) as caught:
        make_build(settings, registry)
    assert [str(problem) for problem in caught.value.problems] == [
        "cluster.critic_num_nodes x cluster.critic_num_gpus_per_node: found them with the estimator 'grpo', which reads no values; "
        "wanted an estimator with a critic; give --advantage-estimator ppo, or leave them out"
    ]


@pytest.mark.faults
@pytest.mark.slow
def test_ppo_with_a_critic_apart_learns_what_it_learns_among_the_ranks_also_after_one_died(
    one_node, train, root, tiny_llama, tmp_path
):
    common = (
        "--hf-checkpoint", str(tiny_llama), "--output-dir", str(tmp_path), "--num-rollout", "4", "--tracker", "jsonl",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--no-bf16",
        "--lr", "1e-3", "--rm-type", "slime_bench.step.work:parity", "--num-steps-per-rollout", "2",
        "--eval-interval", "none", "--save-interval", "1", "--launcher", "ray",
        "--ray-device", "cpu", "--actor-num-gpus-per-node", "2", "--advantage-estimator", "ppo", "--lambd", "0.9",
        "--kl-coef", "0.1", "--critic-lr", "1e-2", "--num-critic-only-steps", "1",
    )  # fmt: skip
    recipe, pool = root / "recipes/quickstart.toml", ("--critic-num-gpus-per-node", "2")
    dies = json.dumps({"DIES_IN": "5"})  # in the first optimizer step of step 3
    trouble = ("--train-env-vars", dies, "--value-loss-type", "trouble_in_training:value_loss")
    with pytest.raises(Exception, match=r"critic rank 1 of 2 \(process .* died during learn"):
        train(recipe, *common, *pool, *trouble, "--run-name", "apart")
    assert writers_below(tmp_path) == []
    checkpoint = tmp_path / "apart/checkpoints/step_000002/trainer"
    assert (checkpoint / "trainer.json").exists() and (checkpoint / "critic/trainer.json").exists()
    assert train(recipe, *common, *pool, "--run-name", "apart")["status"] == "completed"
    assert train(recipe, *common, "--run-name", "among")["status"] == "completed"
    apart, among = steps(tmp_path / "apart"), steps(tmp_path / "among")
    for row in (*apart, *among):  # several differ by the last bit, and each of them may be the worst
        row.pop("train/train_rollout_logprob_abs_diff/worst_sample_index", None)
    assert [row["step"] for row in apart] == [1, 2, 3, 4]
    for ours, theirs in zip(apart, among, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert ["train/loss" in row for row in apart] == [False, True, True, True]
    assert all(row["train/critic/grad_norm"] > 1e-4 for row in apart)
    assert all(row["train/grad_norm"] > 1e-4 for row in apart[1:])
