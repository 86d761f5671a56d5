"""When the platform applies, what it changes, and the command line that goes with it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from slime_core.errors import EngineError
from slime_sglang import compat, cpu, hooks
from slime_sglang.server import server_command, server_environment

#: Calls `install` in one fresh process under each condition, and prints which names of PyTorch it changed.
INSTALL = """
import json, os, torch
from slime_sglang import compat
before = torch.cuda.synchronize, torch.Tensor.cuda
def changed(platform, has_cuda):
    os.environ["SGLANG_PLATFORM"] = platform
    torch.cuda.is_available = lambda: has_cuda
    compat.install()
    return [a is not b for a, b in zip(before, (torch.cuda.synchronize, torch.Tensor.cuda))]
print(json.dumps([changed("", False), changed("cpu_torch", True), changed("cpu_torch", False)]))
"""


def test_platform_is_active_only_when_named_and_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, has_cuda, active in (
        (None, False, False),
        (None, True, False),
        ("cuda", False, False),
        ("cpu_torch", True, False),
        ("cpu_torch", False, True),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
        if named is not None:
            monkeypatch.setenv("SGLANG_PLATFORM", named)
        assert (cpu.activate() is not None) == active, (named, has_cuda)


def test_entry_points_are_those_that_sglang_and_slime_look_for() -> None:
    ours = {
        group: [
            point.value
            for point in entry_points(group=group)
            if point.dist and point.dist.name == "slime-sglang"
        ]
        for group in ("sglang.srt.platforms", "sglang.srt.plugins", "slime")
    }
    assert ours == {
        "sglang.srt.platforms": ["slime_sglang.cpu:activate"],
        "sglang.srt.plugins": ["slime_sglang.compat:install"],
        "slime": ["slime_sglang.hooks"],
    }


def test_patches_apply_only_where_the_platform_is_active() -> None:
    unnamed, with_cuda, active = json.loads(
        subprocess.check_output([sys.executable, "-c", INSTALL], text=True)
    )
    assert (unnamed, with_cuda, active) == ([False, False], [False, False], [True, True])


def test_patches_refuse_a_version_that_they_were_not_written_for() -> None:
    compat.check_version("0.5.23")
    compat.check_version("0.5.30.post1")
    for version in ("0.5.22", "0.6.0"):
        with pytest.raises(EngineError, match=f"found sglang {version}"):
            compat.check_version(version)


def test_hooks_name_sglang_without_importing_it() -> None:
    assert hooks.slime_environment()["sglang"][0].isdigit()
    code = "import sys, slime_sglang.hooks; sys.exit(' '.join({'torch', 'sglang'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_command_on_cuda_leaves_the_choices_to_sglang() -> None:
    command = server_command("m", port=8000, dtype="bfloat16", device="cuda")
    assert " ".join(command[1:]) == (
        "-m sglang.launch_server --model-path m --host 127.0.0.1 --port 8000 --dtype bfloat16"
    )
    assert server_environment(device="cuda") == {}


def test_command_on_a_cpu_bounds_the_cache_and_takes_pytorch() -> None:
    command = server_command(
        "m", port=8000, dtype="float32", device="cpu", arguments=["--max-total-tokens", "9"]
    )
    assert " ".join(command).endswith(
        "--device cpu --attention-backend torch_native --disable-cuda-graph --skip-server-warmup "
        "--max-total-tokens 32768 --max-running-requests 64 --max-total-tokens 9"
    )
    assert server_environment(device="cpu") == {"SGLANG_PLATFORM": "cpu_torch", "CUDA_VISIBLE_DEVICES": ""}
