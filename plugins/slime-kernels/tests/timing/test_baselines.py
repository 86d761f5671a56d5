"""Times of PyTorch: measured once a problem and GPU, read back, and never taken from a damaged file."""

from __future__ import annotations

import json
import threading
import time

import pytest
from slime_core.errors import DataError
from slime_kernels.timing.baselines import Baselines
from slime_kernels.timing.gpus import KernelDevice

H100 = KernelDevice(name="NVIDIA H100 80GB HBM3", bytes_per_us=3.35e6, cache_bytes=50 << 20)
A100 = KernelDevice(name="NVIDIA A100-SXM4-40GB", bytes_per_us=1.555e6, cache_bytes=40 << 20)


def record(median_us, *, trusted=True):
    return {"eager": {"median_us": median_us, "noise": 0.01, "trusted": trusted}, "answers": []}


def never():
    raise AssertionError("measured again")


def test_what_was_measured_is_read_back_by_problem_and_gpu(tmp_path):
    Baselines(tmp_path).get(H100, "one", lambda: record(3.0))
    again = Baselines(tmp_path)
    assert again.get(H100, "one", never)["eager"]["median_us"] == 3.0
    assert again.get(H100, "two", lambda: record(4.0))["eager"]["median_us"] == 4.0
    assert again.get(A100, "one", lambda: record(5.0))["eager"]["median_us"] == 5.0
    assert again.get(H100, "one", never)["gpu"] == "NVIDIA H100 80GB HBM3"
    files = sorted(tmp_path.rglob("*.json"))
    assert [file.parent.name for file in files] == ["NVIDIA-A100-SXM4-40GB", *["NVIDIA-H100-80GB-HBM3"] * 2]
    assert {"torch", "triton"} == json.loads(files[0].read_text())["versions"].keys()


def test_what_is_not_trusted_is_in_no_file_and_measured_again_after_a_minute(tmp_path, monkeypatch):
    baselines, now = Baselines(tmp_path), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    baselines.get(H100, "one", lambda: record(3.0, trusted=False))
    assert list(tmp_path.rglob("*.json")) == []
    assert baselines.get(H100, "one", never)["eager"]["median_us"] == 3.0
    now += 61
    assert baselines.get(H100, "one", lambda: record(2.0))["eager"]["median_us"] == 2.0
    now += 1000
    assert baselines.get(H100, "one", never)["eager"]["median_us"] == 2.0


def test_a_record_is_kept_if_all_of_its_times_are_trusted(tmp_path):
    noisy = record(3.0) | {"compile": {"median_us": 2.0, "noise": 0.4, "trusted": False}}
    fails = record(4.0) | {"compile": {"error": "no compiler"}}
    assert Baselines(tmp_path).get(H100, "one", lambda: noisy)["compile"]["median_us"] == 2.0
    assert list(tmp_path.rglob("*.json")) == []
    assert Baselines(tmp_path).get(H100, "two", lambda: fails)["compile"] == {"error": "no compiler"}
    assert Baselines(tmp_path).get(H100, "two", never)["eager"]["median_us"] == 4.0
    (file,) = tmp_path.rglob("*.json")  # of before, when it was kept
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compile": noisy["compile"]}))
    assert Baselines(tmp_path).get(H100, "two", lambda: record(5.0))["eager"]["median_us"] == 5.0


def test_other_problems_and_gpus_are_measured_meanwhile_and_the_same_one_only_once():
    baselines, others, ended = Baselines(None), threading.Barrier(3, timeout=10), []

    def slow():
        """End when two others measure as well."""
        others.wait()
        return record(1.0)

    def get(gpu, code):
        ended.append(baselines.get(gpu, code, slow)["eager"]["median_us"])

    asked = [(H100, "one"), (H100, "two"), (A100, "one"), (H100, "one"), (H100, "one")]
    threads = [threading.Thread(target=get, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [1.0] * 5


def test_a_damaged_file_is_named(tmp_path):
    Baselines(tmp_path).get(H100, "one", lambda: record(3.0))
    (file,) = tmp_path.rglob("*.json")
    for damaged in (
        "",
        "{}",
        file.read_text().replace("3.0", "0.0"),
        file.read_text().replace("H100", "A100"),
    ):
        file.write_text(damaged)
        with pytest.raises(DataError, match=f"{file.name}: found no times of a problem"):
            Baselines(tmp_path).get(H100, "one", never)
