#!/usr/bin/env python
"""Write docs/plugins.md (groups and hooks), docs/flags.md (settings), docs/map.md (where things are), docs/model-support.md (what
tests prove of model families), and what slime_core knows of packages that are not installed (plugins/index.json), from the code.
A test fails when they are stale."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import importlib_metadata
from slime_compat.flags.pages import flags_page as flags_of_slime_page
from slime_compat.flags.pages import migration_page
from slime_core import hookspecs
from slime_core.config.parsing.schema import Schema, build_schema
from slime_core.plugins.registry import Registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = ROOT / "packages/slime-core/src/slime_core/plugins/index.json"
SUPPORT = ROOT / "packages/slime-models/src/slime_models/family/support.json"
HEAD = "<!-- Written by scripts/generate_docs.py; change the code and run it again. -->\n\n"


def plugins_page(registry: Registry) -> str:
    """Return the page of groups and hooks."""
    lines = [
        HEAD + "# What a plugin can be\n",
        "A thing that is chosen by name is an entry point in one of these groups. [How to write one](write-a-plugin.md).\n",
        "| group | what it is | chosen by | the object is called as |",
        "| --- | --- | --- | --- |",
    ]
    for group in registry.groups.values():
        flags = ", ".join(f"`{flag}`" for flag in group.flags)
        lines.append(f"| `{group.name}` | {group.summary} | {flags} | `{_cell(group.contract)}` |")
    lines += [
        "\nA thing that every plugin may do is a hook: a function marked `slime_core.plugins.hooks.hookimpl` in the module "
        "that the distribution names in the entry-point group `slime`.\n",
        "| hook | when, and what it returns |",
        "| --- | --- |",
    ]
    for name, function in inspect.getmembers(hookspecs, inspect.isfunction):
        if name.startswith("slime_"):
            arguments = ", ".join(inspect.signature(function).parameters)
            lines.append(f"| `{name}({arguments})` | {_cell(inspect.getdoc(function) or '')} |")
    return "\n".join(lines) + "\n"


def flags_page(schema: Schema) -> str:
    """Return the page of settings."""
    intro = (
        "Each is a key of a table in a recipe, and a flag. On the command line a switch is `--NAME` or `--no-NAME`, a list is several words, a "
        "table is JSON (`'{\"key\": 1}'`), and nothing (None) is `none`, in recipes too.\n"
    )
    lines = [HEAD + "# Settings\n", intro]
    for table in schema.models:
        lines += [
            f"\n## [{table}]\n",
            f"From {schema.owners[table]}.\n",
            "| flag | takes | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for flag in schema.flags.values():
            if flag.table == table:
                takes, meaning = _cell(flag.takes), _cell(flag.info.description or "")
                lines.append(f"| `{flag.spelled}` | {takes} | `{flag.default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def map_page() -> str:
    """Return the page of modules: of each folder, what each of its files is about, by the first line of its docstring."""
    lines = [
        HEAD + "# Where things are\n",
        "Each package, each folder, each file, by the first line of its docstring. Folders are layers: in each package the ones "
        "above import the ones below (`[tool.importlinter]` in pyproject.toml).",
    ]
    for source in sorted([*ROOT.glob("packages/*/src/*"), *ROOT.glob("plugins/*/src/*")]):
        if not (source / "__init__.py").exists():
            continue
        lines.append(f"\n## {source.name}\n\n{_about(source / '__init__.py')}")
        folders = sorted({path.parent for path in source.rglob("*.py")})
        for folder in folders:
            files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
            if not files:
                continue
            name = folder.relative_to(source).as_posix()
            lines.append(f"\n**{name}/** {_about(folder / '__init__.py')}\n" if name != "." else "")
            lines += [f"- `{path.name}`: {_about(path)}" for path in files]
    return "\n".join(lines) + "\n"


def support_page(registry: Registry) -> str:
    """Return the page of model families, by `support.json` and what families declare."""
    from slime_models.family.support import FEATURES, table

    families = [registry.resolve("slime.models", plugin.name) for plugin in registry.plugins("slime.models")]
    (heading, *rows), notes = table(families)
    lines = [
        HEAD + "# What has been shown of each model family\n",
        "`yes` is what a test of this repository proves: those marked `proves`, which run with the others, some only with `-m faults`, on CPUs. `no` has the "
        "reason that the family gives, `open` has none: nobody has tried. Empty: its models have no such thing. `slime models "
        "support` prints the same, for families of other packages too.\n",
        f"| {' | '.join(heading)} |",
        f"| {' | '.join('---' for _ in heading)} |",
        *(f"| {' | '.join(_cell(word) for word in row)} |" for row in rows),
        "",
        *(f"({number}) {note}\n" for number, note in enumerate(notes, 1)),
        "| | shown where it says yes |",
        "| --- | --- |",
        *(f"| {feature} | {_cell(meaning)} |" for feature, meaning in FEATURES.items()),
    ]
    return "\n".join(lines) + "\n"


def proving_files() -> list[Path]:
    """Return the test files that have a test marked `proves`."""
    found = [
        path for folder in ("packages", "plugins", "tests") for path in (ROOT / folder).rglob("test_*.py")
    ]
    return sorted(path for path in found if "mark.proves" in path.read_text(encoding="utf-8"))


def write_support() -> None:
    """Write `support.json`: what the tests that are there prove."""
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "--proofs", str(SUPPORT)]
    command = [sys.executable, "-m", "pytest", *words, *map(str, proving_files())]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _about(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def index(registry: Registry, schema: Schema) -> str:
    """Return what distributions besides slime-core bring; see `slime_core.plugins.index`."""
    brought: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"groups": [], "plugins": defaultdict(list), "sections": [], "flags": [], "prefixes": []}
    )
    for plugin in registry.plugins():
        if plugin.distribution not in ("slime-core", "slime-example-family", "slime-example-reward"):
            brought[plugin.distribution]["plugins"][plugin.group].append(plugin.name)
    for point in importlib_metadata.entry_points(group="slime.groups"):
        assert point.dist is not None
        brought[point.dist.name]["groups"].append(point.load().name)
    for table, owner in schema.owners.items():
        if owner != "slime-core":
            brought[owner]["sections"].append(table)
    for flag in schema.flags.values():
        if (owner := schema.owners[flag.table]) != "slime-core":
            brought[owner]["flags"].append(flag.name)
    for table, flags in schema.foreign.items():
        if flags.prefix:
            brought[schema.owners[table]]["prefixes"].append(flags.prefix)
    return json.dumps(brought, indent=1, sort_keys=True) + "\n"


def pages() -> dict[Path, str]:
    """Return every generated file."""
    registry = Registry()
    schema = build_schema(registry)
    return {
        DOCS / "plugins.md": plugins_page(registry),
        DOCS / "flags.md": flags_page(schema),
        DOCS / "flags-of-slime.md": flags_of_slime_page(schema),
        DOCS / "migrate-from-verl.md": migration_page(),
        DOCS / "map.md": map_page(),
        DOCS / "model-support.md": support_page(registry),
        INDEX: index(registry, schema),
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write_support()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT), file=sys.stderr)
