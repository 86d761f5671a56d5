"""`scripts/gpu_proof` without a GPU: every stage works in a tiny form, and nothing says that it was proven on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STAGES = {
    "versions", "gpu-tests", "trainer-tests", "engine-tests", "attention-plans", "bench-trainer", "bench-engine", "bench-launches", "decode-steps",
    "quickstart", "ranks-on-one-gpu", "transports", "kernels", "kernel-times",
}  # fmt: skip


@pytest.fixture
def proof(root, tmp_path):
    """Return a function that runs the script, its reports in `tmp_path`."""

    def run(*words):
        command = [sys.executable, root / "scripts/gpu_proof", "--out", tmp_path, *words]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=root, timeout=1100)

    return run


@pytest.mark.faults
@pytest.mark.slow
def test_a_dry_run_passes_every_stage_and_says_that_nothing_was_proven(proof, tmp_path):
    done = proof("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was proven on CUDA" in done.stdout
    reports = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert reports.keys() == STAGES
    for name, report in reports.items():
        assert (report["stage"], report["status"], report["error"]) == (name, "passed", None)
        assert (report["dry_run"], report["proven_on_cuda"], report["device"]) == (True, False, "cpu")
        assert all(aim["met"] is None for aim in report["aims"])
        assert report["figures"]
    assert reports["gpu-tests"]["figures"]["counts"] == {"skipped": 6}
    assert reports["kernels"]["figures"]["counts"] == {"skipped": 1}
    assert len(reports["kernel-times"]["figures"]["variants"]) == 2
    assert reports["trainer-tests"]["figures"]["counts"]["passed"] > 0
    assert len(reports["bench-trainer"]["figures"]["work"]) == 2
    assert [aim["what"] for aim in reports["bench-engine"]["aims"]] == [
        "share of what reading the weights allows, 2 requests"
    ]


def test_a_stage_that_fails_says_so_and_ends_with_status_1(proof, tmp_path):
    done = proof("--dry-run", "--stage", "quickstart", "--model", tmp_path / "missing")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "quickstart.json").read_text())
    assert (report["status"], report["proven_on_cuda"], report["figures"]) == ("failed", False, None)
    assert "CalledProcessError" in report["error"]
    assert str(tmp_path / "missing") in (tmp_path / "quickstart.log").read_text()


def test_an_aim_that_was_missed_fails_the_stage(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    from gpu_stages import Stage

    stage = Stage(root, dry=False, model=None)
    stage.aim("tokens a second", 23_000, at_least=24_000)
    stage.aim("seconds", 60, at_most=60)
    assert [aim["met"] for aim in stage.aims] == [False, True]


def test_without_a_gpu_a_dry_run_has_to_be_asked_for(proof, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.fail("this machine has a GPU: run `scripts/gpu_proof` itself")
    done = proof("--stage", "versions")
    assert (done.returncode, done.stdout) == (2, "")
    assert "found no CUDA device; wanted one, or --dry-run" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_stages_are_named(proof):
    done = proof("--list")
    assert done.returncode == 0
    assert {line.split()[0] for line in done.stdout.splitlines()} == STAGES


def test_a_bundle_has_what_our_packages_need_and_not_what_is_there(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    from wheels import BROUGHT, OURS, THERE, closure

    found = closure(BROUGHT)
    assert set(OURS) <= found.keys()
    assert {"megatron-core", "pytest", "pydantic", "reasoning-gym"} <= found.keys()
    assert not found.keys() & {*THERE, "nvidia-cublas"}


def test_an_archive_above_the_limit_is_refused(root, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(root / "scripts")
    from wheels import check_size

    small, large = tmp_path / "small.tar", tmp_path / "large.tar"
    for file, n_bytes in ((small, 10), (large, 65 * 2**20)):
        with file.open("wb") as out:
            out.truncate(n_bytes)
    assert (check_size(small), check_size(large)) == (0, 1)
    assert "wanted at most 64" in capsys.readouterr().err
