"""A third party's weight transport: installed, it is chosen by name, checked, and used by engines and trainers that know nothing of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from slime_models.testing import check_transport

from ..plugins import pipe_transport
from .test_bad_input import plugin

SOURCE = Path(pipe_transport.__file__).read_text()
#: Name of a broken variant -> (what is replaced, by what, what `slime plugins check` says of it).
BROKEN = {
    "forgets": (
        "for name, tensor in bucket)",
        "for name, tensor in bucket if name != 'b')",
        "update to version 1: found WeightSyncError: update to version 1: 1 of 4 tensors were not sent: b; wanted one",
    ),
    "flips": (
        "flat = ",
        "data[:1] = bytes([data[0] ^ 1]) if data else b''; flat = ",
        "update to version 1: found other bytes in ['a', 'b', 'bias']; wanted those that were sent",
    ),
    "hasty": (
        "self._pipe.close()",
        "error[0] and self.end(), self._pipe.close()",
        "an update that breaks off: found it as an update; wanted an error, or none within its deadline",
    ),
    "stale": (
        "[(name, tensor)]",
        "[(name, vars(self).setdefault(name, tensor))]",
        "update to version 2: found other bytes in ['a', 'b', 'bias']; wanted those that were sent",
    ),
    "half": (
        ", create_receiver=PipeReceiver",
        ", create_receiver=None",
        "found TypeError: 'NoneType' object is not callable; wanted two halves",
    ),
    "other": (
        "TRANSPORT = Transport(",
        "TRANSPORT = dict(",
        "wanted Transport, which has name, create_sender, create_receiver",
    ),
}  # fmt: skip


def variants() -> dict[str, str]:
    """Return module -> source, of the transport and its broken variants."""
    sources = {"pipe": SOURCE}
    for name, (old, new, _) in BROKEN.items():
        assert SOURCE.count(old) == 1, (name, SOURCE.count(old))
        sources[name] = SOURCE.replace(old, new)
    return {f"acme_{name}": source for name, source in sources.items()}


def entry_points() -> str:
    lines = [f"{name} = acme_{name}:TRANSPORT" for name in ("pipe", *BROKEN)]
    return "\n".join(["[slime.transports]", *lines, ""])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the transport is installed, and its broken variants are."""
    return os.environ | plugin(tmp_path_factory.mktemp("site"), "acme", entry_points(), **variants())


def test_it_keeps_the_promises_of_its_kind():
    check_transport(pipe_transport.TRANSPORT)


@pytest.fixture(scope="module")
def checked(slime, environment):
    """The lines of `slime plugins check`."""
    ended = slime("plugins", "check", env=environment | {"SLIME_PLUGINS": "acme"})
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    return ended.stdout.splitlines()


@pytest.mark.faults
def test_the_check_of_plugins_takes_it_and_what_comes_with_slime(checked):
    assert "ok  slime.transports acme/pipe" in checked


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_of_plugins_refuses_a_broken_one_with_the_reason(checked, name):
    (line,) = [line for line in checked if f"acme/{name}" in line]
    assert line.startswith("bad ")
    assert BROKEN[name][2] in line


@pytest.fixture
def torch_run(letters, qwen3):
    """Words of a run of Megatron's trainer and the engine torch."""
    flags = {
        "hf-checkpoint": qwen3, "rollout-engine": "torch", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "num-rollout": 2, "n-samples-per-prompt": 4,
        "eval-interval": "none", "save-interval": "none", "lr": "1e-3",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(letters), "--no-bf16", "--no-save-last", *words]


@pytest.mark.slow
def test_it_brings_the_weights_of_a_run_to_the_engine_torch(slime, environment, torch_run, tmp_path):
    ended = slime("train", *torch_run, "--update-weight-transport", "pipe", env=environment)
    assert ended.returncode == 0, ended.stderr
    lock = (tmp_path / "runs/letters/plugins.lock.json").read_text()
    assert '"slime.transports"' in lock
    assert '"acme"' in lock


@pytest.mark.slow
def test_one_that_damages_tensors_ends_the_run_with_their_names(slime, environment, torch_run):
    ended = slime("train", *torch_run, "--update-weight-transport", "flips", env=environment)
    assert ended.returncode == 1
    assert "the bytes that arrived are not those that were sent" in ended.stderr
    assert "model.embed_tokens.weight" in ended.stderr


def test_one_that_is_not_installed_is_refused_with_the_nearest_name(slime, environment, torch_run):
    ended = slime("check", *torch_run, "--update-weight-transport", "pip", env=environment)
    assert ended.returncode == 2
    assert "train.update_weight_transport (--update-weight-transport): found 'pip'" in ended.stderr
    assert "did you mean 'pipe'?" in ended.stderr


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_it_brings_the_weights_of_a_run_to_an_sglang_server(environment, sglang_run, tmp_path):
    run = [*sglang_run, "--update-weight-transport", "pipe", "--sglang-staging-dir", str(tmp_path)]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
