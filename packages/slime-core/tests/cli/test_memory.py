"""`slime plan --memory`: what it prints, and when it refuses."""

from __future__ import annotations

import pytest
from slime_core.cli import memory
from slime_core.cli.machine import device, memory_bytes
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.protocols.memory import Device

pytestmark = pytest.mark.usefixtures("memory_parts")

FLAGS = (
    *("--rollout-batch-size", "100", "--rollout-max-response-len", "8", "--max-tokens-per-gpu", "400"),
    *("--train-backend", "memory_parts:trainer", "--rollout-engine", "memory_parts:engine"),
)


def test_the_table_has_the_parts_and_the_sum(capsys, tmp_path):
    assert memory.main([*FLAGS, "--hf-checkpoint", str(tmp_path), "--device-memory-gb", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["weights", "0.10", "0.05"] in rows
    assert ["activations", "0.39"] in rows
    assert ["on", "the", "device", "0.49", "0.15"] in rows
    assert ["host:", "reference", "0.01"] in rows


def test_what_cannot_fit_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError) as refused:
        memory.main(
            [*FLAGS, "--hf-checkpoint", str(tmp_path), "--prompt-tokens", "7", "--device-memory-gb=0.4"]
        )
    (problem,) = refused.value.problems
    assert str(problem).startswith(
        "memory: found 0.6 GiB on the GPU of trainer and engine while it trains; wanted at most 0.4 GiB; "
        "--max-tokens-per-gpu 100 (0.3 GiB, perhaps 40% more time); or --rollout-batch-size 12 (0.3 GiB, perhaps 90% more time)"
    )


def test_what_fits_with_shorter_samples_is_said_and_not_refused(tmp_path, capsys):
    words = [*FLAGS, "--hf-checkpoint", str(tmp_path), "--prompt-tokens", "7", "--device-memory-gb=0.6"]
    assert memory.main(words) == 0
    assert (
        "may not fit  with samples as long as 15 tokens, or as many: memory: found 0.6 GiB on the GPU of trainer and engine while it "
        "trains; wanted at most 0.6 GiB; --max-tokens-per-gpu 200 (0.4 GiB, perhaps 20% more time); or "
        "--rollout-batch-size 50 (0.6 GiB, perhaps 30% more time); or --max-tokens-per-gpu 100 (0.3 GiB, perhaps 40% more time)"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--device-memory-gb"], ["--device-memory-gb", "0"], ["--device-memory-gb", "x"]]
)
def test_a_size_is_a_number_above_0(words):
    with pytest.raises(ConfigError, match=r"--device-memory-gb: found .*; wanted a number above 0"):
        memory.main([*FLAGS, "--hf-checkpoint", "m", *words])


def test_a_flag_of_the_command_is_taken_out_of_the_words():
    words = ["a.toml", "--lr", "1", "--device-memory-gb", "80", "--overwrite"]
    assert memory.taken(words, "--device-memory-gb") == (["a.toml", "--lr", "1", "--overwrite"], 80.0)
    assert memory.taken(words, "--prompt-tokens") == (words, None)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts an `nvidia-smi` into the path that prints some lines."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def put(*lines):
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        smi.chmod(0o755)

    return put


def test_of_several_gpus_the_largest_counts(nvidia_smi):
    nvidia_smi("A, 80000 MiB, 9 MiB, 5", "B, 4000 MiB, 9 MiB, 5")
    assert device() == Device(kind="cuda", memory_bytes=80000 * 2**20)


def test_of_a_gpu_that_tells_nothing_of_its_memory_it_is_not_known(nvidia_smi):
    nvidia_smi("A, [N/A], [N/A], 5")
    assert device() == Device(kind="cuda", memory_bytes=None)


def test_hidden_gpus_are_none(nvidia_smi, monkeypatch):
    nvidia_smi("A, 80000 MiB, 9 MiB, 5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device() == Device(kind="cpu", memory_bytes=memory_bytes())
    assert memory_bytes() > 2**28


def test_memory_of_other_machines_is_not_known_unless_it_is_given(monkeypatch):
    def of(*flags, memory_gb=None):
        settings = load_settings([], [*FLAGS, "--hf-checkpoint", "m", *flags], registry=Registry())
        return memory.device_of(settings, memory_gb).memory_bytes

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert of("--launcher", "ray") is not None
    assert of("--launcher", "ray", "--actor-num-nodes", "2") is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert of() is not None
    assert of("--launcher", "ray") is None
    assert of("--launcher", "ray", memory_gb=80) == 80 * 2**30
