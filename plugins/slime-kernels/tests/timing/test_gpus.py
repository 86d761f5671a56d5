"""Devices: taken in turn, shared or alone, and refused by name where there are none."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_kernels.commands import main
from slime_kernels.timing.gpus import Devices, KernelDevice, devices_for, find_gpus

ASK = [sys.executable, "-c", "from slime_kernels.timing.gpus import _ask; _ask()"]


def gpu(visible="0"):
    return KernelDevice(name=f"test {os.getpid()}", bytes_per_us=1e6, cache_bytes=1 << 20, visible=visible)


def test_devices_are_taken_in_turn():
    devices = Devices([gpu("0"), gpu("1"), gpu("2")])
    assert [devices.take().visible for _ in range(5)] == ["0", "1", "2", "0", "1"]


def test_who_times_waits_for_all_others_and_lets_nobody_in_before_it():
    one, order = gpu(), []
    turn = next_turn(one)

    def use(name, *, alone):
        with one.used(alone=alone):
            order.append(name)

    with one.used(alone=False), one.used(alone=False):  # several may try candidates
        timing = threading.Thread(target=use, args=["timing"], kwargs={"alone": True})
        timing.start()
        while not is_locked(turn):  # it waits now, and has the turn
            pass
        trying = threading.Thread(target=use, args=["trying"], kwargs={"alone": False})
        trying.start()
        assert order == []
    timing.join()
    trying.join()
    assert order == ["timing", "trying"]


def next_turn(one):
    with one.used(alone=False):
        folder = Path(tempfile.gettempdir(), f"slime-gpu-locks-{os.getuid()}")
    return folder / f"{one.name.replace(' ', '-')}-{one.visible}.turn"


def is_locked(path):
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_without_a_gpu_cuda_is_refused_by_name_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"kernels\.device: found 'cuda', and no driver of a GPU"):
        devices_for("cuda")
    assert devices_for("auto") is None
    assert devices_for("cpu") is None


def test_the_command_refuses_it_with_status_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = tmp_path / "problem.py"
    problem.write_text("class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n")
    assert main(["eval", str(problem), str(problem), "--device", "cuda"]) == 2
    assert "slime kernels: kernels.device: found 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "wanted"), [((), ["kernels.device"]), (("--kernels-service", "http://there/eval"), [])]
)
def test_a_run_is_refused_that_wants_one_unless_a_service_evaluates(monkeypatch, tmp_path, flags, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    registry, recipe = Registry.from_environment(), tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nhf_checkpoint = "m"\n[rollout]\nrollout_batch_size = 1\nrollout_max_response_len = 1\n[kernels]\ndevice = "cuda"\n'
    )
    problems = check_settings(load_settings([str(recipe)], flags, registry=registry), registry)
    assert [problem.where for problem in problems if problem.where.startswith("kernels.")] == wanted


def test_a_machine_without_a_driver_is_told_in_a_sentence():
    asked = subprocess.run(
        ASK, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert asked.returncode == 1
    assert asked.stderr.startswith(("torch ", "no library of the driver", "no GPU that the driver shows"))


@pytest.mark.gpu
def test_a_gpu_tells_its_name_its_bandwidth_and_its_cache():
    found = find_gpus()
    assert not isinstance(found, str), found
    for one in found:
        assert one.name and one.nodes and Path(one.library, "libcuda.so.1").exists()
        assert 1e5 < one.bytes_per_us < 2e7  # 0.1 to 20 TB/s
        assert one.cache_bytes >= 1 << 20
    assert json.loads(subprocess.run(ASK, capture_output=True, text=True, check=True).stdout)
