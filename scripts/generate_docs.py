#!/usr/bin/env python
"""Write docs/plugins.md (groups and hooks) and docs/flags.md (settings) from the code. A test fails when they are stale."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from slime_core.config.schema import Schema, build_schema
from slime_core.plugins import hooks
from slime_core.plugins.groups import GROUPS
from slime_core.plugins.registry import Registry

DOCS = Path(__file__).parents[1] / "docs"
HEAD = "<!-- Written by scripts/generate_docs.py; change the code and run it again. -->\n\n"


def plugins_page() -> str:
    """Return the page of groups and hooks."""
    lines = [
        HEAD + "# What a plugin can be\n",
        "A thing that is chosen by name is an entry point in one of these groups. [How to write one](write-a-plugin.md).\n",
        "| group | what it is | chosen by | the object is called as |",
        "| --- | --- | --- | --- |",
    ]
    for group in GROUPS:
        flags = ", ".join(f"`{flag}`" for flag in group.flags)
        lines.append(f"| `{group.name}` | {group.summary} | {flags} | `{_cell(group.contract)}` |")
    lines += [
        "\nA thing that every plugin may do is a hook: a function marked `slime_core.plugins.hooks.hookimpl` in the module "
        "that the distribution names in the entry-point group `slime`.\n",
        "| hook | when, and what it returns |",
        "| --- | --- |",
    ]
    for name, function in inspect.getmembers(hooks, inspect.isfunction):
        if name.startswith("slime_"):
            arguments = ", ".join(inspect.signature(function).parameters)
            lines.append(f"| `{name}({arguments})` | {_cell(inspect.getdoc(function) or '')} |")
    return "\n".join(lines) + "\n"


def flags_page(schema: Schema) -> str:
    """Return the page of settings."""
    intro = "Each is a key of a table in a recipe, and a flag. Where None is a value, it is written `none`.\n"
    lines = [HEAD + "# Settings\n", intro]
    for table in schema.models:
        lines += [
            f"\n## [{table}]\n",
            f"From {schema.owners[table]}.\n",
            "| flag | default | meaning |",
            "| --- | --- | --- |",
        ]
        for flag in schema.flags.values():
            if flag.table == table:
                default, meaning = flag.default, _cell(flag.info.description or "")
                lines.append(f"| `{flag.spelled}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return every generated page."""
    registry = Registry()
    return {DOCS / "plugins.md": plugins_page(), DOCS / "flags.md": flags_page(build_schema(registry))}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent), file=sys.stderr)
