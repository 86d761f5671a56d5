"""`clusters/slurm.sh` with stand-ins for Slurm's commands, which start each of its machines' processes on this one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slime_core.runtime.processes.ports import ReservedPort

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

#: Starts what follows its own options, on this machine; Ray by `RAY`.
SRUN = """#!/bin/sh
echo "srun $*" >>"$STOOD_IN"
export PATH="$(dirname "$0")/failing:$PATH"
while [ "${1#--}" != "$1" ]; do shift; done
if [ "$1" = hostname ]; then echo 127.0.0.1; exit; fi
exec "$@"
"""
#: Takes the place of `ray`: it fails once for the head, and once for a machine that joins, as where they are busy.
RAY = """#!/bin/sh
case "$*" in *--head*) failed="$STOOD_IN.head";; *) failed="$STOOD_IN.joining";; esac
if [ ! -e "$failed" ]; then touch "$failed"; exit 1; fi
exec "$SLURM_SUBMIT_DIR/.venv/bin/ray" "$@"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >>"$STOOD_IN"
printf 'first\\nsecond\\n'
"""


@pytest.fixture
def submit(tmp_path: Path, root: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts the script as Slurm does; whatever it leaves is ended with the test."""
    stand_ins = tmp_path / "bin"
    (stand_ins / "failing").mkdir(parents=True)
    for name, script in (("srun", SRUN), ("failing/ray", RAY), ("scontrol", SCONTROL)):
        (stand_ins / name).write_text(script)
        (stand_ins / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    reserved = ReservedPort()
    ray_folder = tempfile.mkdtemp(prefix="slurm-")  # names of sockets are short
    environment = os.environ | {
        "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(root / "tests/plugins"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "2",
        "SLIME_RAY_PORT": str(reserved.number),
        "RAY_TMPDIR": ray_folder,
        "STOOD_IN": str(tmp_path / "calls"),
    }
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    started = []

    def start(*words: str, machines: int = 2) -> subprocess.Popen[bytes]:
        with (tmp_path / "output").open("w") as output:
            script = subprocess.Popen(
                ["bash", str(root / "clusters/slurm.sh"), *words],
                env=environment | {"SLURM_JOB_NUM_NODES": str(machines)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(script)
        return script

    yield start
    for script in started:
        script.kill()
    for pid in marked(f"STOOD_IN={tmp_path}/calls"):  # Slurm ends what a job leaves; here it is for us to do
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reserved.release()
    shutil.rmtree(ray_folder, ignore_errors=True)


def marked(variable: str) -> list[int]:
    """Return the processes whose environment has a variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def ended(job: subprocess.Popen[bytes], output: Path, *, timeout_s: float) -> int | None:
    """Return the status of a job, None where it does not end in time; shows what it printed with the test's failure."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout=timeout_s)
    print(output.read_text())
    return job.returncode


def test_a_job_of_two_machines_trains_on_one_of_them(submit, letters, tmp_path):
    letters_run = [str(letters), "--train-backend", "letters.told:create_trainer", "--num-rollout"]
    job = submit(*letters_run, "3")
    assert ended(job, tmp_path / "output", timeout_s=500) == 0
    run = tmp_path / "runs/letters"
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("train/ranks") for row in rows] == [None, 2.0, 2.0, 2.0]
    for rank in range(2):  # which had GPUs, as far as Ray knows
        assert '"CUDA_DEVICE_MAX_CONNECTIONS": "1"' in (run / f"ranks/rank_00{rank}.log").read_text()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "scontrol show hostnames node[1-2]"
    assert "--nodelist=first" in calls[1]
    assert "--nodelist=first" in calls[2]
    assert "ray start --head" in calls[2]
    assert "--num-gpus=2" in calls[2]
    assert "--exclude=first" in calls[3]
    assert "--num-gpus=2" in calls[3]
    assert (tmp_path / "calls.head").exists()
    assert (tmp_path / "calls.joining").exists()


def test_a_signal_before_the_time_is_up_reaches_the_run_which_saves(submit, letters, tmp_path):
    job = submit(str(letters), "--train-backend", "letters.told:create_trainer", "--num-rollout", "100000")
    metrics = tmp_path / "runs/letters/metrics.jsonl"
    deadline = time.monotonic() + 500
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert job.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)  # to the script alone, as `--signal=B:TERM@300` does
    assert ended(job, tmp_path / "output", timeout_s=300) == 143
    summary = json.loads((tmp_path / "runs/letters/summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (tmp_path / f"runs/letters/checkpoints/step_{summary['steps']:06d}").is_dir()


def test_what_it_cannot_do_is_said_at_once(submit, letters, tmp_path):
    for words, machines, said in (
        ([], 2, "found no recipe; wanted: sbatch [--nodes=N] clusters/slurm.sh RECIPE.toml"),
        ([str(letters)], 1, "found 1 machine; wanted 2 or more"),
    ):
        job = submit(*words, machines=machines)
        assert job.wait(timeout=60) == 2
        assert said in (tmp_path / "output").read_text()
