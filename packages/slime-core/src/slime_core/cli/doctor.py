"""`slime doctor`: what is installed, which versions fit, and what a recipe misses."""

from __future__ import annotations

import re
from pathlib import Path

from importlib_metadata import PackageNotFoundError, distributions, version
from packaging.specifiers import SpecifierSet
from rich.console import Console

from slime_core.checks.chosen_plugins import chosen
from slime_core.cli.arguments import read_stages, wants_help
from slime_core.cli.machine import machine
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry

HELP = """usage: slime doctor [RECIPE.toml ... [--flag value ...]]

Prints what this machine has (cores, memory, disk, GPUs), the installed slime packages and whether what they require fits.
With a recipe: which of the plugins that it chooses are missing. Exit status 1 if something is missing."""

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*)?$")


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    console = Console(soft_wrap=True, highlight=False)
    console.print("[bold]this machine[/bold]")
    for name, value in machine(Path.cwd()).items():
        console.print(f"  {name}: {value}", markup=False)
    problems = _packages(console)
    registry = Registry.from_environment()
    console.print("[bold]what installed plugins compute with[/bold]")
    versions = dict(each for answer in registry.hooks.slime_environment() for each in answer.items())
    for name, value in sorted(versions.items()):
        console.print(f"  {name}: {value}", markup=False)
    for distribution, why in registry.broken_hooks.items():
        problems += 1
        console.print(f"[red]{distribution}: {why}[/red]")
    if argv:
        problems += _recipe(console, argv, registry)
    console.print("[green]nothing is missing[/green]" if not problems else f"[red]{problems} problems[/red]")
    return 1 if problems else 0


def _packages(console: Console) -> int:
    problems = 0
    ours = sorted({d.name: d for d in distributions() if d.name.startswith("slime-")}.items())
    for name, distribution in ours:
        console.print(f"[bold]{name} {distribution.version}[/bold]")
        for requirement in distribution.requires or ():
            match = _REQUIREMENT.match(requirement)
            if match is None or "extra ==" in (match[3] or ""):
                continue
            found = _version(match[1])
            if found is None or not SpecifierSet(match[2].strip()).contains(found, prereleases=True):
                problems += 1
                console.print(
                    f"  [red]{match[1]}: found {found or 'nothing'}; wanted {match[2].strip() or 'any version'}[/red]"
                )
            else:
                console.print(f"  {match[1]} {found}")
    return problems


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _recipe(console: Console, argv: list[str], registry: Registry) -> int:
    problems = 0
    stages = read_stages(argv, registry)
    for choice in dict.fromkeys(c for stage in stages for c in chosen(stage.settings, registry)):
        try:
            registry.resolve(choice.group, choice.reference, flag=choice.flag)
        except PluginError as error:
            problems += 1
            console.print(f"[red]{choice.setting}: {error}[/red]")
    return problems
