"""`slime doctor`: what is installed, which versions fit, and what a recipe misses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from importlib_metadata import PackageNotFoundError, distributions, version
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console

from slime_core.checks.chosen_plugins import chosen
from slime_core.cli.arguments import read_stages, wants_help
from slime_core.cli.machine import machine
from slime_core.config.settings import Settings
from slime_core.config.stages import Stage
from slime_core.devices.cuda_variables import CUDA_VARIABLES, cuda_defaults, sees_gpu, users_environment
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry

HELP = """usage: slime doctor [--json] [RECIPE.toml ... [--flag value ...]]

Prints what this machine has (cores, memory, disk, shared memory, ports, GPUs and their links), the installed slime packages and
whether what they require fits, the versions of what they compute with, and the environment variables that processes get where they
use CUDA (docs/clusters.md). With a recipe: which of the plugins that it chooses are missing. --json prints one JSON object instead.
Imports none of the packages that compute, and needs no tool: what cannot be known is said. Exit status 1 if something is missing."""


@dataclass(frozen=True)
class Findings:
    """What is found, as text by name."""

    machine: dict[str, str]
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    """Each of ours, with its version -> what it requires -> the version that is there, or what is wrong with it."""
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    words = [word for word in argv if word != "--json"]
    registry = Registry.from_environment()
    found = Findings(machine(Path.cwd()))
    _packages(found)
    versions = registry.hooks.slime_environment()
    found.versions.update(sorted(each for answer in versions for each in answer.items()))
    found.problems.extend(f"{name}: {why}" for name, why in registry.broken_hooks.items())
    stages = read_stages(words, registry) if words else []
    found.variables.update(_variables(stages))
    found.problems.extend(_missing(stages, registry))
    for stage in stages[:1]:
        _staging(found, stage.settings)
    if len(words) < len(argv):
        print(json.dumps(asdict(found), indent=2))
    else:
        _show(found)
    return 1 if found.problems else 0


def _show(found: Findings) -> None:
    console = Console(soft_wrap=True, highlight=False)

    def table(title: str, rows: Mapping[str, str]) -> None:
        console.print(f"[bold]{title}[/bold]")
        for name, value in rows.items():
            is_wrong = f"{name}: {value}" in found.problems
            console.print(f"  {name}: {value}", markup=False, style="red" if is_wrong else None)

    table("this machine", found.machine)
    for name, requirements in found.packages.items():
        table(name, requirements)
    table("what installed plugins compute with", found.versions)
    table("variables of processes that use CUDA", found.variables)
    for problem in found.problems:
        console.print(problem, markup=False, style="red")
    n = len(found.problems)
    console.print("[green]nothing is missing[/green]" if not n else f"[red]{n} problems[/red]")


def _packages(found: Findings) -> None:
    ours = sorted({d.name: d for d in distributions() if d.name.startswith("slime-")}.items())
    for name, distribution in ours:
        rows = found.packages[f"{name} {distribution.version}"] = {}
        for text in distribution.requires or ():
            try:
                one = Requirement(text)
            except InvalidRequirement:
                rows[text] = "found no requirement that can be read"
                found.problems.append(f"{text}: {rows[text]}")
                continue
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            there = _version(one.name)
            rows[one.name] = there or ""
            if there is None or not one.specifier.contains(there, prereleases=True):
                rows[one.name] = f"found {there or 'nothing'}; wanted {one.specifier or 'any version'}"
                found.problems.append(f"{one.name}: {rows[one.name]}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _variables(stages: Sequence[Stage]) -> dict[str, str]:
    """Return what processes that are started here would get of each variable, and who says so."""
    own = users_environment(os.environ)
    given: dict[str, str] = {}
    for stage in stages:
        given |= stage.settings.cluster.train_env_vars
    rows = (
        {} if sees_gpu(own) else {"on this machine": "none is set, as no GPU is seen; with one it would be:"}
    )
    for variable in CUDA_VARIABLES:
        told = []
        for receiver in variable.values:
            name = variable.name
            if receiver == "trainer" and name in given:
                value, by = given[name], "by --train-env-vars"
            elif name in own:
                value, by = own[name], "by this environment"
            else:
                value, by = cuda_defaults(receiver, own)[name], "by slime"
            told.append(f"{receiver} {value} ({by})")
        rows[variable.name] = ", ".join(told)
    return rows


def _staging(found: Findings, settings: Settings) -> None:
    """Tell how much an update of weights takes where the engine stages it, which one that has servers does in a folder."""
    section = settings.sections.get(settings.rollout.rollout_engine.rpartition("/")[2])
    folder = getattr(section, "staging_dir", None)
    if folder is None:
        return
    what = "an update of weights"
    size = sum(file.stat().st_size for file in Path(settings.model.hf_checkpoint).glob("*.safetensors"))
    if not size:
        found.machine[what] = f"is staged at {folder}; how large is known when the model's folder is there"
        return
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found.machine[what] = f"found no {folder} ({error.strerror}); wanted a folder for {size / 1e9:.1f} GB"
    else:
        lacks = free < size
        more = f"; wanted {size / 1e9:.1f} GB, or another --sglang-staging-dir" if lacks else ""
        found.machine[what] = f"{size / 1e9:.1f} GB at {folder}, where {free / 1e9:.1f} GB are free{more}"
        if not lacks:
            return
    found.problems.append(f"{what}: {found.machine[what]}")


def _missing(stages: Sequence[Stage], registry: Registry) -> Iterator[str]:
    """Yield which of the plugins that are chosen cannot be had."""
    for choice in dict.fromkeys(c for stage in stages for c in chosen(stage.settings, registry)):
        try:
            registry.resolve(choice.group, choice.reference, flag=choice.flag)
        except PluginError as error:
            yield f"{choice.setting}: {error}"
