"""`slime plugins`: what is installed, by group."""

from __future__ import annotations

import contextlib
import inspect
import json

from rich.markup import escape
from rich.table import Table

from slime_core.cli.arguments import wants_help, wide_console
from slime_core.errors import ContractError, PluginError
from slime_core.plugins.registry import HOOK_GROUP, Registry

HELP = """usage: slime plugins [list [GROUP ...] [--json] | show GROUP NAME | check]

  list    every plugin by group; imports hook modules only, and shows those that are left out in red
  show    what one plugin is, how it is called, and its options
  check   import every plugin, and run the contract kits of its kind over it (entry points of `slime.kits`), or say what one
          needs that only a test can give it; exit status 1 if a promise is broken

The environment variable SLIME_PLUGINS names the distributions that may provide plugins (comma-separated)."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    verb, *rest = argv or ["list"]
    registry = Registry.from_environment()
    if verb == "list":
        return _list(registry, rest)
    if verb == "show" and len(rest) == 2:
        return _show(registry, *rest)
    if verb == "check" and not rest:
        return _check(registry)
    raise PluginError(f"slime plugins: found {' '.join(argv)!r}; wanted list, show GROUP NAME, or check")


def _list(registry: Registry, rest: list[str]) -> int:
    groups = [_group(registry, word) for word in rest if word != "--json"] or list(registry.groups)
    if "--json" in rest:
        rows = [vars(plugin) for group in groups for plugin in registry.plugins(group)]
        print(json.dumps({"plugins": rows, "broken_hooks": dict(registry.broken_hooks)}, indent=2))
        return 0
    table = Table(
        "group", "name", "distribution", "version", "chosen by", box=None, pad_edge=False, header_style="bold"
    )
    for group in groups:
        names = [plugin.name for plugin in registry.plugins(group)]
        for plugin in registry.plugins(group):
            clash = names.count(plugin.name) > 1
            shown = f"[red]{plugin.qualified}[/red] (name taken twice)" if clash else plugin.name
            flags = " ".join(registry.groups[group].flags[:1])
            table.add_row(group, shown, plugin.distribution, plugin.version, flags)
        if not names:
            table.add_row(
                group, "(none installed)", "", "", " ".join(registry.groups[group].flags[:1]), style="dim"
            )
    console = wide_console()
    console.print(table)
    for distribution, why in registry.broken_hooks.items():
        console.print(f"[red]{distribution}: {why}[/red]")
    return 0


def _show(registry: Registry, group: str, name: str) -> int:
    group = _group(registry, group)
    try:
        plugin = registry.find(group, name)
    except PluginError as error:
        raise PluginError(f"found {name!r}; wanted the name of a plugin: {error}") from error
    value = registry.load(plugin)
    about = registry.groups[plugin.group]
    origin = f"{plugin.distribution} {plugin.version}" if plugin.distribution else "an import reference"
    print(f"{plugin.qualified}: {about.summary}\nfrom {origin}, {plugin.value}\ncalled as {about.contract}")
    if callable(value):
        with contextlib.suppress(TypeError, ValueError):  # what is written in C may not say
            print(f"signature {inspect.signature(value)}")
    print(f"\n{inspect.getdoc(value) or '(no docstring)'}")
    return 0


def _check(registry: Registry) -> int:
    from slime_core.testing.contracts import (
        check_plugin,  # imports numpy, which the other subcommands do without
    )

    console = wide_console()
    failures: dict[str, str] = {}
    for plugin in (*registry.plugins(), *registry.plugins(HOOK_GROUP)):
        what = f"{plugin.group} {plugin.qualified}"
        try:
            left_out = check_plugin(registry, plugin)
        except ContractError as error:
            failures[what] = str(error)
        else:
            tried = "" if left_out is None else f"  [dim]not tried: {escape(left_out)}[/dim]"
            console.print(f"[green]ok[/green]  {what}{tried}")
    for what, why in failures.items():
        console.print(f"[red]bad[/red] {what}: {escape(' '.join(why.split()))}")
    return 1 if failures else 0


def _group(registry: Registry, word: str) -> str:
    name = word if word.startswith("slime.") else f"slime.{word}"
    registry.check_group(name)
    return name
