"""When the platform applies, what it changes, and the command line that goes with it."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from slime_core.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, EngineError
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import LetterTokenizer
from slime_sglang import compat, cpu, hooks
from slime_sglang.key import new_key, read_key
from slime_sglang.section import SglangSection, known_arguments
from slime_sglang.server import gpu_arguments, server_arguments, server_command, server_environment

SCRIPT = Path(__file__).parents[3] / "scripts/sglang_flags.py"

#: Calls `install` in one fresh process under each condition, and prints which names of PyTorch it changed.
INSTALL = """
import json, os, torch
from slime_sglang import compat
def calls():
    return torch.cuda.synchronize, torch.Tensor.cuda, torch.cuda.cudart
before = calls()
def changed(platform, has_cuda):
    os.environ["SGLANG_PLATFORM"] = platform
    torch.cuda.is_available = lambda: has_cuda
    compat.install()
    return [a is not b for a, b in zip(before, calls())]
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
    assert (unnamed, with_cuda, active) == ([False] * 3, [False] * 3, [True] * 3)


ORPHAN = """
import multiprocessing, os, sys, time
from slime_sglang import compat

def child(parent, report):
    while os.getppid() == parent:
        time.sleep(0.01)
    compat.install()
    os.write(report, b"survived")

context = multiprocessing.get_context("fork")
context.Process(target=child, args=(os.getpid(), int(sys.argv[1]))).start()
os._exit(0)
"""


def test_a_process_of_sglang_that_begins_without_its_parent_ends() -> None:
    reading, writing = os.pipe()
    subprocess.run([sys.executable, "-c", ORPHAN, str(writing)], pass_fds=[writing], check=True, timeout=60)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        assert report.read() == b""  # to the end of the last process that could write


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
        "-m slime_sglang.launch --model-path m --host 127.0.0.1 --port 8000 --dtype bfloat16"
    )
    assert server_environment(device="cuda") == {}


def test_command_on_a_cpu_bounds_the_cache_and_takes_pytorch() -> None:
    command = server_command(
        "m", port=8000, dtype="float32", device="cpu", arguments=["--max-total-tokens", "9"]
    )
    assert " ".join(command).endswith(
        "--device cpu --attention-backend torch_native --disable-cuda-graph --skip-server-warmup --sleep-on-idle "
        "--max-total-tokens 32768 --max-running-requests 64 --max-total-tokens 9"
    )
    assert server_environment(device="cpu") == {"SGLANG_PLATFORM": "cpu_torch", "CUDA_VISIBLE_DEVICES": ""}


def test_servers_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for n_servers, threads in ((2, max(1, cores // 2)), (cores + 1, 1), (3 * cores, 1)):
        environment = server_environment(device="cpu", n_ranks_in_all=n_servers)
        assert environment["OMP_NUM_THREADS"] == str(threads)
    assert "OMP_NUM_THREADS" not in server_environment(device="cpu")
    assert server_environment(device="cuda", n_ranks_in_all=2) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in server_environment(device="cpu", n_ranks_in_all=2)


def test_ranks_of_a_server_on_a_cpu_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 6})
    bind = "SGLANG_CPU_OMP_THREADS_BIND"
    assert server_environment(device="cpu", n_ranks=2)[bind] == "2,4,6|3,5"
    assert server_environment(device="cpu", n_ranks=6)[bind] == "2|3|4|5|6|2"  # more than there are
    assert bind not in server_environment(device="cpu", n_ranks_in_all=2)


def test_servers_on_cuda_get_one_gpu_after_the_other() -> None:
    assert gpu_arguments({}, first=2, device="cuda") == {"base_gpu_id": 2}
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, device="cuda") == {"base_gpu_id": 6}
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, count=2, device="cuda") == {
        "base_gpu_id": 6,
        "tp_size": 2,
    }
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, count=2, device="cpu") == {"tp_size": 2}


def test_the_list_of_arguments_is_that_of_the_installed_sglang() -> None:
    spec = importlib.util.spec_from_file_location("sglang_flags", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert sorted(known_arguments()) == script.flags()


def problems_of(*flags: str, recipes: Sequence[str] = ()) -> list[str]:
    settings = load_settings(recipes, [*flags, "--hf-checkpoint", "m"], registry=Registry.from_environment())
    return [str(problem) for problem in hooks.slime_check_config(settings=settings)]


REQUIRED = ("--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--rollout-engine", "sglang")


def test_an_argument_of_sglang_is_a_flag_with_its_prefix() -> None:
    settings = load_settings(
        [],
        [*REQUIRED, "--hf-checkpoint", "m", "--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics"],
        registry=Registry.from_environment(),
    )
    given = settings.section(SglangSection).server_args
    assert server_arguments(given) == ["--mem-fraction-static", "0.8", "--enable-metrics"]


def test_an_argument_that_sglang_has_not_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sglang-mem-fraction-statik: .*--sglang-mem-fraction-static"):
        problems_of(*REQUIRED, "--sglang-mem-fraction-statik", "0.8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[sglang.server_args]\nmem_fraction_statik = 0.8\n")
    (problem,) = problems_of(*REQUIRED, recipes=[str(recipe)])
    assert "did you mean 'mem_fraction_static'?" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-port", "80")
    assert "slime gives the server itself" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-tp-size", "2")
    assert "fleet.rollout_num_gpus_per_engine" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-ssl-keyfile", "key.pem")
    assert "wanted nothing: the server listens on this host alone, to plain HTTP" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-api-key", "a-secret")
    assert "wanted nothing: the run makes a key for its servers" in problem
    assert "a-secret" not in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-dp-size", "2")
    assert "sglang.server_args.dp_size: found 2; wanted 1; weights that arrive are proven for" in problem
    assert problems_of(*REQUIRED, "--sglang-dp-size", "1") == []


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        (("--sglang-tokenizer-worker-num", "2"), "found 2; wanted 1"),
        (("--sglang-grpc-port", "7"), "found 7; wanted nothing"),
        (("--sglang-smg-grpc-mode",), "found True; wanted nothing"),
    ],
)
def test_ways_into_a_server_past_its_key_are_refused(flag: Sequence[str], wanted: str) -> None:
    (problem,) = problems_of(*REQUIRED, *flag)
    assert wanted in problem
    assert "does not ask for the run's key" in problem
    assert problems_of(*REQUIRED, "--sglang-tokenizer-worker-num", "1") == []


EXTERNAL = ("--rollout-external-engine-addrs", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file; wanted one line"),
        ("one\ntwo\n", "more than a key; wanted one line"),
        ("a key", "more than a key"),
        ("schlüssel", "more than a key"),
        (b"\xff\xfe", "(not UTF-8); wanted a file with a key"),
        (None, "(No such file or directory); wanted a file with a key"),
    ],
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (problem,) = problems_of(*REQUIRED, *EXTERNAL, "--rollout-external-key-file", str(file))
    assert problem.startswith(f"fleet.rollout_external_key_file: found {file}")
    assert message in problem


def test_a_key_is_read_from_its_file_and_wants_something_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-123\n")
    assert read_key(tmp_path / "key", where="x") == "sk-123"
    flag = ("--rollout-external-key-file", str(tmp_path / "key"))
    assert problems_of(*REQUIRED, *EXTERNAL, *flag) == []
    assert problems_of(*REQUIRED, "--sglang-router-ip", "a", "--sglang-router-port", "1", *flag) == []
    (problem,) = problems_of(*REQUIRED, *flag)
    assert (
        "and nothing that runs already; wanted rollout_external_engine_addrs or sglang_router_ip" in problem
    )


def test_a_key_is_hidden_where_values_are_shown_and_kept_where_they_are_copied() -> None:
    key = new_key()
    copies = [pickle.loads(pickle.dumps(key)), copy.deepcopy(key)]
    assert all(repr({"api_key": each}) == "{'api_key': '***'}" for each in (key, *copies))
    assert f"{key}" == str(copies[0]) == str(copies[1])
    assert key != new_key()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--rollout-top-p", "0.9"), ("--rollout-top-k", "5"), ("--rollout-min-new-tokens", "2")],
)
def test_what_would_make_log_probs_not_the_policys_is_refused(flag: str, value: str) -> None:
    (problem,) = problems_of(*REQUIRED, flag, value)
    assert flag[2:].replace("-", "_") in problem
    assert problems_of(*REQUIRED[:-1], "torch", flag, value) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"), "wanted a multiple of 2"),
        (("--prefill-num-servers", "1"), "found 1 of 1 engines; wanted 2 engines at least"),
        (("--rollout-num-gpus", "3", "--prefill-num-servers", "3"), "found 3 of 3 engines; wanted 2 at most"),
        (("--sglang-config", "missing.yaml"), "missing.yaml (No such file or directory); wanted a YAML file"),
        (("--rollout-num-gpus", "2", "--rollout-external-engine-addrs", "127.0.0.1:1"), "wanted one of them"),
        (("--rollout-external-engine-addrs", "127.0.0.1:1", "b"), "found 'b'; wanted host:port"),
        (("--rollout-external-engine-addrs", "a:70000"), "found 'a:70000'; wanted host:port"),
        (
            ("--rollout-external-engine-addrs", "192.0.2.1:1"),
            "the engine 192.0.2.1:1 on another host; wanted disk",
        ),
        (("--sglang-router-ip", "a"), "wanted the router's port"),
        (("--sglang-router-port", "80"), "found it without a router"),
        (("--router-policy", "random", "--sglang-router-ip", "a", "--sglang-router-port", "1"), "own policy"),
    ],
)
def test_engines_that_do_not_add_up_are_refused(flags: Sequence[str], message: str) -> None:
    problems = set(problems_of(*REQUIRED, *flags))
    assert len(problems) == 1
    assert message in problems.pop()
    assert problems_of(*REQUIRED[:-1], "torch", *flags) == []


def test_engines_on_other_hosts_get_weights_by_disk_or_none_at_all() -> None:
    where = ("--rollout-external-engine-addrs", "192.0.2.1:1", "127.0.0.1:1")
    assert problems_of(*REQUIRED, *where, "--update-weight-transport", "disk") == []
    assert problems_of(*REQUIRED, *where, "--train-backend", "none") == []
    (problem,) = problems_of(
        *REQUIRED, *where, "--update-weight-transport", "disk", "--update-weight-mode", "delta"
    )
    assert "found disk-delta, and the engine 192.0.2.1:1 on another host; wanted disk, in full" in problem


def build_problems(*flags: str, folder: Path = Path("m")) -> list[str]:
    registry = Registry.from_environment()
    settings = load_settings([], [*REQUIRED, *flags, "--hf-checkpoint", str(folder)], registry=registry)
    build = BuildContext(
        settings=settings,
        registry=registry,
        tokenizer=LetterTokenizer(),
        model_path=folder,
        run_dir=folder,
    )
    return [str(problem) for problem in hooks.slime_check_build(build=build)]


def test_a_router_is_refused_where_the_run_needs_each_tokens_experts() -> None:
    replay, router = "--use-rollout-routing-replay", ("--router-policy", "random")
    (problem,) = build_problems(replay, *router)
    assert "fleet.router_policy: found it in a run that needs the experts of each token" in problem
    assert build_problems(replay) == build_problems(*router) == []


def test_engines_that_do_half_of_the_work_are_refused_where_that_is_not_proven(tmp_path: Path) -> None:
    apart = ("--rollout-num-gpus", "2", "--prefill-num-servers", "1")
    apart += ("--sglang-disaggregation-transfer-backend", "nixl")  # what mooncake needs, a machine may lack
    assert problems_of(*REQUIRED, *apart) == build_problems(*apart) == []
    (problem,) = problems_of(*REQUIRED, *apart, "--router-policy", "random")
    assert "fleet.router_policy: found it with prefill and decode engines; wanted no router" in problem
    (problem,) = build_problems("--use-rollout-routing-replay", *apart)
    assert "prefill and decode engines in a run that needs the experts of each token" in problem
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 3}')
    (problem,) = build_problems("--multimodal-keys", '{"image": "images"}', *apart, folder=tmp_path)
    assert "prefill and decode engines with data.multimodal_keys; wanted regular engines" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-disaggregation-transfer-backend", "fake")
    assert "from a cache that nobody filled" in problem


def test_images_want_a_model_that_sees_them_and_no_router(tmp_path: Path) -> None:
    images = ("--multimodal-keys", '{"image": "images"}')
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    (problem,) = build_problems(*images, folder=tmp_path)
    assert "whose config.json has no image_token_id, with data.multimodal_keys" in problem
    config.write_text('{"model_type": "qwen3_vl", "image_token_id": 3}')
    assert build_problems(*images, folder=tmp_path) == []
    (problem,) = build_problems(*images, "--router-policy", "random", folder=tmp_path)
    assert "fleet.router_policy: found it with data.multimodal_keys; wanted no router" in problem
