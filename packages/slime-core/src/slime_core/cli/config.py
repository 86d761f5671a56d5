"""`slime config`: resolved settings with their origins, and the table of all flags."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from slime_core.cli.arguments import read_stages, translation_of, wants_help, wide_console
from slime_core.config.parsing.schema import build_schema
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry

HELP = """usage: slime config [show RECIPE.toml ... [--flag value ...] | flags]

  show    every value and where it came from, for each stage of the recipe
  flags   every flag: section, default, meaning"""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv) or not argv:
        print(HELP)
        return 0
    verb, *rest = argv
    registry = Registry.from_environment()
    if verb == "show":
        _show(registry, rest)
    elif verb == "flags" and not rest:
        _flags(registry)
    else:
        raise ConfigError([Problem("slime config", repr(" ".join(argv)), "show RECIPE.toml ..., or flags")])
    return 0


def _show(registry: Registry, argv: list[str]) -> None:
    for stage in read_stages(argv, registry):
        if stage.name:
            wide_console().print(f"\n[bold]stage {stage.name}[/bold]")
        _show_settings(stage.settings)
    if (translation := translation_of(argv, registry)) is not None:
        wide_console().print(f"\n[bold]what became of other flags[/bold]  {translation.origin}")
        for note in translation.notes:
            wide_console().print(f"  {note}", markup=False)


def _show_settings(settings: Settings) -> None:
    table = Table("setting", "value", "from", box=None, pad_edge=False, header_style="bold")
    for name, section in settings.sections.items():
        for field, value in section.model_dump().items():
            origin = settings.origin(name, field)
            style = "dim" if origin == "default" else ""
            table.add_row(f"{name}.{field}", escape(repr(value)), escape(origin), style=style)
    wide_console().print(table)


def _flags(registry: Registry) -> None:
    schema = build_schema(registry)
    for name in schema.models:
        table = Table("flag", "takes", "default", "meaning", box=None, pad_edge=False, header_style="bold")
        for flag in schema.flags.values():
            if flag.table == name:
                meaning = " ".join((flag.info.description or "").split())
                table.add_row(flag.spelled, escape(flag.takes), escape(flag.default), escape(meaning))
        console = wide_console()
        console.print(f"\n[bold]\\[{name}][/bold]  from {schema.owners[name]}")
        console.print(table)
