"""What the hooks find wrong with settings, and that they import neither torch nor sglang."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from slime_core.checks.unread_flags import unread_flags
from slime_core.cli import doctor
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import LetterTokenizer
from slime_sglang import hooks
from slime_sglang.factory import create_engine
from slime_sglang.http.api_key import read_key


def test_hooks_name_sglang_without_importing_it() -> None:
    assert hooks.slime_environment()["sglang"][0].isdigit()
    code = "import sys, slime_sglang.hooks; sys.exit(' '.join({'torch', 'sglang'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def problems_of(*flags: str, recipes: Sequence[str] = ()) -> list[str]:
    settings = load_settings(recipes, [*flags, "--hf-checkpoint", "m"], registry=Registry.from_environment())
    return [
        str(problem)
        for problem in hooks.slime_check_config(settings=settings, registry=Registry.from_environment())
    ]


def unread(*flags: str) -> list[str]:
    registry = Registry.from_environment()
    settings = load_settings([], [*REQUIRED, *flags, "--hf-checkpoint", "m"], registry=registry)
    return [str(problem) for problem in unread_flags([settings], registry)]


REQUIRED = ("--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--rollout-engine", "sglang")


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
    assert "wanted nothing: the server listens to plain HTTP" in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-api-key", "a-secret")
    assert "wanted nothing: the run makes a key for its servers" in problem
    assert "a-secret" not in problem
    (problem,) = problems_of(*REQUIRED, "--sglang-dp-size", "2")
    assert "sglang.server_args.dp_size: found 2; wanted enable_dp_attention beside it, or 1" in problem
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


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--rollout-top-p", "0.9"), ("--rollout-top-k", "5"), ("--rollout-min-new-tokens", "2")],
)
def test_what_would_make_log_probs_not_the_policys_is_refused(flag: str, value: str) -> None:
    (problem,) = problems_of(*REQUIRED, flag, value)
    assert flag[2:].replace("-", "_") in problem
    assert problems_of(*REQUIRED[:-1], "slime-sglang/sglang", flag, value) == [problem]
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
        (
            ("--sglang-enable-eplb",),
            "sglang.server_args.enable_eplb: found True; wanted no such argument of a server whose weights are updated",
        ),
    ],
)
def test_engines_that_do_not_add_up_are_refused(flags: Sequence[str], message: str) -> None:
    problems = set(problems_of(*REQUIRED, *flags))
    assert len(problems) == 1
    assert message in problems.pop()
    registry = Registry.from_environment()
    other = load_settings([], [*REQUIRED[:-1], "torch", *flags, "--hf-checkpoint", "m"], registry=registry)
    unread = list(unread_flags([other], registry))
    assert len(unread) == len([flag for flag in flags if flag.startswith("--")])
    assert {problem.wanted for problem in unread} == {"--rollout-engine sglang, or not this flag"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--rollout-health-check-interval", "2"),
        ("--rollout-health-check-timeout", "2"),
        ("--rollout-health-check-first-wait", "2"),
        ("--rollout-engine-restarts", "1"),
    ],
)
def test_settings_of_a_watch_over_engines_are_refused_without_it(flag: str, value: str) -> None:
    (problem,) = unread(flag, value)
    assert problem.endswith(
        f"found {flag}, which nothing reads here; wanted --use-fault-tolerance, or not this flag"
    )
    assert unread(flag, value, "--use-fault-tolerance") == []


@pytest.mark.parametrize(
    "flags", [("--sglang-mem-fraction-static", "0.8"), ("--rollout-num-gpus-per-engine", "2")]
)
def test_what_reaches_no_external_server_is_refused(flags: Sequence[str]) -> None:
    (problem,) = unread(*EXTERNAL, *flags)
    assert f"found {flags[0]}, which nothing reads here; wanted no --rollout-external-engine-addrs" in problem
    assert unread(*flags, "--rollout-num-gpus", "2") == unread(*EXTERNAL) == []


def test_a_router_is_refused_where_caches_of_earlier_weights_are_kept() -> None:
    flags = ("--loop", "fully-async", "--update-weights-in-flight")
    (problem,) = problems_of(*REQUIRED, *flags, "keep", "--router-policy", "random")
    assert "fleet.router_policy: found it with update_weights_in_flight keep; wanted no router" in problem
    assert problems_of(*REQUIRED, *flags, "keep") == []
    assert problems_of(*REQUIRED, *flags, "continue", "--router-policy", "random") == []


def test_engines_on_other_hosts_get_weights_by_disk_or_none_at_all() -> None:
    where = ("--rollout-external-engine-addrs", "192.0.2.1:1", "127.0.0.1:1")
    assert problems_of(*REQUIRED, *where, "--update-weight-transport", "disk") == []
    assert problems_of(*REQUIRED, *where, "--train-backend", "none") == []
    (problem,) = problems_of(
        *REQUIRED, *where, "--update-weight-transport", "disk", "--update-weight-mode", "delta"
    )
    assert "found disk-delta, and the engine 192.0.2.1:1 on another host; wanted disk, in full" in problem


def test_engines_on_other_hosts_get_weights_by_their_ranks_where_they_can_reach_this_one() -> None:
    nccl = ("--rollout-external-engine-addrs", "192.0.2.1:1", "--update-weight-transport", "nccl")
    (problem,) = problems_of(*REQUIRED, *nccl, "--update-weight-host", "127.0.0.1")
    assert "nccl, and the engine 192.0.2.1:1 on another host" in problem
    assert "no loopback address as --update-weight-host" in problem
    assert (
        problems_of(*REQUIRED, *nccl)
        == problems_of(*REQUIRED, *nccl, "--update-weight-host", "192.0.2.9")
        == []
    )
    ipc = ("--rollout-external-engine-addrs", "192.0.2.1:1", "--update-weight-transport", "cuda-ipc")
    (problem,) = problems_of(*REQUIRED, *ipc, "--update-weight-host", "192.0.2.9")
    assert "cuda-ipc, and the engine 192.0.2.1:1 on another host" in problem


def test_updates_that_are_staged_nowhere_are_refused_on_shared_devices() -> None:
    nccl = ("--update-weight-transport", "nccl")
    assert problems_of(*REQUIRED, *nccl) == problems_of(*REQUIRED, *nccl, "--use-fault-tolerance") == []
    (problem,) = problems_of(*REQUIRED, *nccl, "--colocate")
    assert "found nccl with colocate; wanted cuda-ipc, memory, distributed or disk; NCCL refuses" in problem
    ipc = (*REQUIRED, "--update-weight-transport", "cuda-ipc", "--colocate")
    assert problems_of(*ipc) == problems_of(*ipc, "--use-fault-tolerance") == []
    apart = (*ipc, "--actor-num-gpus-per-node", "2", "--launcher", "ray", "--prefill-num-servers", "1")
    assert problems_of(*apart) == []
    (problem,) = problems_of(*apart, "--use-fault-tolerance")
    assert (
        "found cuda-ipc with use_fault_tolerance and prefill and decode engines, where trainer and engine offload"
        in problem
    )


def test_weights_that_reach_one_machine_are_refused_where_servers_share_gpus_on_several() -> None:
    nodes = (*REQUIRED, "--colocate", "--actor-num-nodes", "2")
    for flags, name in (
        (("--update-weight-transport", "memory"), "memory"),
        (("--update-weight-transport", "disk", "--update-weight-mode", "delta"), "disk-delta"),
    ):
        (problem,) = problems_of(*nodes, *flags)
        assert f"found {name} with colocate on 2 nodes; wanted cuda-ipc, or disk in full" in problem
        assert "by cuda-ipc, the default, a rank on each sends to the servers there" in problem
    assert problems_of(*nodes) == problems_of(*nodes, "--use-fault-tolerance") == []
    for each in ("cuda-ipc", "disk"):
        assert problems_of(*nodes, "--update-weight-transport", each) == []
    assert problems_of(*nodes, "--train-backend", "none") == problems_of(*REQUIRED, "--colocate") == []


def build_of(*flags: str, folder: Path = Path("m")) -> BuildContext:
    registry = Registry.from_environment()
    settings = load_settings([], [*REQUIRED, *flags, "--hf-checkpoint", str(folder)], registry=registry)
    return BuildContext(
        settings=settings,
        registry=registry,
        load_tokenizer=LetterTokenizer,
        model_path=folder,
        run_dir=folder,
    )


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ((), "nccl"),
        (("--colocate",), "cuda-ipc"),
        (("--colocate", "--use-fault-tolerance"), "cuda-ipc"),
        (("--train-backend", "none"), None),  # which sends by none
    ],
)
def test_weights_reach_servers_on_several_machines_where_nothing_else_is_asked_for(flags, wanted) -> None:
    build = build_of(*flags)
    assert create_engine.transport(build) is None  # this process starts them
    assert create_engine.transport(replace(build, places={})) is None  # all on one machine
    assert create_engine.transport(replace(build, places={}, host="10.0.0.1")) == wanted


def test_a_deadline_of_health_checks_that_no_server_meets_is_refused() -> None:
    watched = (*REQUIRED, "--use-fault-tolerance", "--rollout-health-check-timeout")
    (problem,) = problems_of(*watched, "1.5")
    assert problem.startswith("fleet.rollout_health_check_timeout: found 1.5; wanted 2 at least")
    assert "looks for its answer to a health check once a second" in problem
    assert problems_of(*watched, "2") == []


@pytest.mark.parametrize(("flags", "timeout_s"), [(("--use-fault-tolerance",), 45.0), ((), None)])
def test_servers_of_the_policy_and_of_other_models_know_the_deadline_of_the_watch_over_them(
    tmp_path: Path, flags: Sequence[str], timeout_s: float | None
) -> None:
    (tmp_path / "config.json").write_text("{}")
    topology = tmp_path / "models.yaml"
    topology.write_text(
        "sglang:\n"
        "  - {name: policy, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
        "  - {name: judge, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
    )
    given = ("--sglang-config", str(topology), "--train-backend", "none", *flags)
    if timeout_s is not None:
        given += ("--rollout-health-check-timeout", f"{timeout_s:g}")
    fleet = create_engine(build_of(*given, folder=tmp_path))
    supervisors = (fleet._supervisor, *fleet._others)
    engines = [replica.engine for supervisor in supervisors for replica in supervisor._replicas]
    assert [engine._settings.health_timeout_s for engine in engines] == [timeout_s, timeout_s]
    asyncio.run(fleet.close())


def build_problems(*flags: str, folder: Path = Path("m")) -> list[str]:
    build = build_of(*flags, folder=folder)
    return [str(problem) for problem in hooks.slime_check_build(build=build)]


def test_a_router_is_refused_where_the_run_needs_each_tokens_experts() -> None:
    replay, router = "--use-rollout-routing-replay", ("--router-policy", "random")
    (problem,) = build_problems(replay, *router)
    assert "fleet.router_policy: found it in a run that needs the experts of each token" in problem
    assert build_problems(replay) == build_problems(*router) == []


def test_prefill_and_decode_engines_are_refused_where_they_are_not_proven(tmp_path: Path) -> None:
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


def test_pipeline_stages_are_refused_where_they_are_not_proven(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    stages = ("--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2")
    assert problems_of(*REQUIRED, *stages) == build_problems(*stages, folder=tmp_path) == []
    (problem,) = build_problems("--use-rollout-routing-replay", *stages, folder=tmp_path)
    assert (
        "pp_size of an engine of 'policy': found 2 in a run that needs the experts of each token; wanted 1"
        in problem
    )
    apart = ("--rollout-num-gpus", "4", "--prefill-num-servers", "1")
    (problem,) = build_problems(*stages, *apart, folder=tmp_path)
    assert "found 2 with prefill and decode engines; wanted 1, or regular engines" in problem
    (problem,) = build_problems("--sglang-pp-size", "2", folder=tmp_path)
    assert "GPUs of an engine of 'policy': found 1 with pp_size 2; wanted a multiple of 2" in problem
    for name in ("pp-size", "attn-dp-size", "attention-data-parallel-size"):
        (problem,) = problems_of(*REQUIRED, f"--sglang-{name}", "two")
        assert f".{name.replace('-', '_')}: found two; wanted a whole number of at least 1" in problem


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


def test_doctor_says_what_an_update_takes_of_the_staging_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    words = ["--json", *REQUIRED, "--hf-checkpoint", str(model), "--sglang-staging-dir", str(tmp_path)]

    def told() -> tuple[str, list[str]]:
        doctor.main(words)
        found = json.loads(capsys.readouterr().out)
        return found["machine"]["an update of weights"], [one for one in found["problems"] if "update" in one]

    assert told() == (f"is staged at {tmp_path}; how large is known when the model's folder is there", [])
    for name, size in (("model-1.safetensors", 2_000_000_000), ("model-2.safetensors", 500_000_000)):
        (model / name).touch()
        os.truncate(model / name, size)  # takes no room
    said, problems = told()
    assert said.startswith(f"2.5 GB at {tmp_path}, where ")
    assert (said.endswith(" are free"), problems) == (True, [])
    os.truncate(model / "model-1.safetensors", 4 * 10**12)
    said, problems = told()
    assert said.endswith("; wanted 4000.5 GB, or another --sglang-staging-dir")
    assert problems == [f"an update of weights: {said}"]
    words[-1] = str(tmp_path / "none")
    assert told()[0] == f"found no {tmp_path}/none (No such file or directory); wanted a folder for 4000.5 GB"
