"""The container file, the scripts and the page on clusters name what there is."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_core.checks.settings import check_settings
from slime_core.cli.main import COMMANDS
from slime_core.config.load import load_settings
from slime_core.devices.cuda_variables import CUDA_VARIABLES
from slime_core.plugins.registry import Registry

#: Where the container has the repository.
IN_CONTAINER = "/opt/slime/"


@pytest.fixture(scope="module")
def locked(root: Path) -> dict[str, str]:
    """Package -> its version in uv.lock."""
    return {one["name"]: one["version"] for one in tomllib.loads((root / "uv.lock").read_text())["package"] if "version" in one}  # fmt: skip


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> list[list[str]]:
    """Words of each instruction."""
    text = re.sub(r"^#.*\n", "", (root / "docker/Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line.strip()]


def instructions(dockerfile: list[list[str]], name: str) -> list[list[str]]:
    return [words for word, *words in dockerfile if word == name]


def test_the_container_copies_what_there_is_and_docker_sees_it(dockerfile, root):
    ignore = (root / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    seen = {line[1:] for line in ignore if line.startswith("!")}
    copied = [words[:-1] for words in instructions(dockerfile, "COPY") if not words[0].startswith("--from")]
    names = {name for sources in copied for name in sources}
    assert names == seen
    assert all((root / name).exists() for name in names)
    readmes = re.findall(r'^readme = "(.*)"', "\n".join(file.read_text() for file in root.glob("p*/*/pyproject.toml")), re.M)  # fmt: skip
    assert set(readmes) <= {"README.md"}  # beside it, in folders that are copied


def test_the_container_installs_groups_that_exist_by_a_uv_that_the_project_takes(dockerfile, root):
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (sync,) = [words for words in instructions(dockerfile, "RUN") if "sync" in words]
    groups = [word for flag, word in itertools.pairwise(sync) if flag == "--group"]
    assert groups == ["plugins", "sglang", "ray"]
    assert set(groups) <= set(project["dependency-groups"])
    assert {"--locked", "--no-dev"} <= set(sync)
    (uv,) = [words for words in instructions(dockerfile, "COPY") if words[0].startswith("--from")]
    version = re.fullmatch(r"--from=ghcr\.io/astral-sh/uv:(\d+)\.(\d+)\.(\d+)", uv[0])
    assert project["tool"]["uv"]["required-version"] == ">=0.8"
    assert tuple(map(int, version.groups())) >= (0, 8)


def test_the_containers_cuda_is_that_of_torch(dockerfile, locked):
    ((image,),) = instructions(dockerfile, "FROM")
    version = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04", image)
    assert locked["nvidia-cuda-runtime"].startswith(f"{version[1]}.")


def test_the_containers_user_is_not_root_and_its_health_is_a_command_of_slime(dockerfile):
    assert instructions(dockerfile, "USER") == [["slime"]]
    (health,) = instructions(dockerfile, "HEALTHCHECK")
    assert "".join(health[health.index("CMD") + 1 :]) == '["slime","doctor"]'
    assert "doctor" in COMMANDS


def commands(text: str) -> list[list[str]]:
    """Words of each `slime` command that stands alone on a line; variables of the shell have values, the container's paths ours."""
    values = {'"$@"': "recipes/sglang.toml", '"$trainers"': "2", '"$gpus"': "8", IN_CONTAINER: ""}
    for name, value in values.items():
        text = text.replace(name, value)
    found = re.findall(r"^(?:.* )?(slime (?:train|doctor|top|check) .*?)(?: &)?$", text, re.MULTILINE)
    return [shlex.split(command, comments=True)[1:] for command in found]


def check(words: list[str], root: Path) -> None:
    """Read a command's recipe and flags as the command does; a run's folder, which `top` wants, must be one that a run here has."""
    name, *words = words
    if name == "top":
        assert words == ["runs/sglang"]
        return
    (recipe, *flags) = words
    assert (root / recipe).is_file()
    registry = Registry.from_environment()
    settings = load_settings([str(root / recipe)], flags, registry=registry)
    assert check_settings(settings, registry) == []


def test_commands_of_the_page_and_the_script_are_taken(root):
    page = "\n".join(re.findall(r"```\n(.*?)```", (root / "docs/clusters.md").read_text(), re.DOTALL))
    script = re.sub(r"^#.*\n", "", (root / "clusters/slurm.sh").read_text(), flags=re.MULTILINE)
    of_page, of_script = commands(page), commands(script)
    assert [words[0] for words in of_page] == ["doctor", "train", "top", "train", "train", "train", "train"]
    assert [words[0] for words in of_script] == ["train"]
    for words in of_page + of_script:
        check(words, root)
    (batch,) = re.findall(r"^sbatch --nodes=\d+ (\S+) (.*)$", page, re.MULTILINE)
    assert (root / batch[0]).is_file()
    check(["train", *shlex.split(batch[1])], root)


def test_variables_of_the_shell_reach_ranks_by_a_flag_that_is_taken(root):
    page = (root / "docs/clusters.md").read_text()
    tables = re.findall(r"`--train-env-vars '(\{.*?\})'`", page)
    assert len(tables) == 2
    for table in tables:
        check(["train", "recipes/sglang.toml", "--launcher", "ray", "--train-env-vars", table], root)


def test_scripts_are_shell(root):
    subprocess.run(["bash", "-n", str(root / "clusters/slurm.sh")], check=True)
    assert (root / "clusters/slurm.sh").stat().st_mode & 0o111


@pytest.fixture(scope="module")
def job(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / "clusters/kuberay.yaml").read_text())
    return found


def test_the_manifest_is_a_job_of_the_locked_ray_whose_numbers_agree(job, locked, root):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == locked["ray"]
    name, command = job["spec"]["entrypoint"].split(maxsplit=1)
    assert name == "slime"
    (words,) = commands(f"slime {command}")
    check(words, root)
    flag = dict(itertools.pairwise(words))
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    gpus = {
        name: group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for name, group in (("head", head), ("workers", workers))
    }
    assert gpus["head"] == head["rayStartParams"]["num-gpus"] == flag["--rollout-num-gpus"]
    assert gpus["workers"] == workers["rayStartParams"]["num-gpus"] == flag["--actor-num-gpus-per-node"]
    replicas = {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")}
    assert replicas == {int(flag["--actor-num-nodes"])}


def test_pods_share_a_volume_for_runs_and_have_shared_memory(job):
    cluster = job["spec"]["rayClusterSpec"]
    images = set()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        images.add(container["image"])
        volumes = {volume.pop("name"): volume for volume in map(dict, spec["volumes"])}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts == {
            "/shared": {"persistentVolumeClaim": {"claimName": "slime-shared"}},
            "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        }
    assert len(images) == 1
    assert "--output-dir /shared/" in job["spec"]["entrypoint"]


def test_the_page_has_the_variables_of_the_code(root):
    page = (root / "docs/clusters.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    expected = []
    for variable in CUDA_VARIABLES:
        cells = [
            "" if who not in variable.values else variable.values[who] or "0 or 1"
            for who in ("trainer", "server")
        ]
        expected.append([f"`{variable.name}`", *cells, variable.why])
    assert [row for row in rows if len(row) == 4] == expected
