"""What the subcommands share: recipes and flags from the command line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from slime_core.config.stages import Stage
    from slime_core.plugins.registry import Registry


def wants_help(argv: Sequence[str]) -> bool:
    """Say whether help is asked for."""
    return "--help" in argv or "-h" in argv


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (recipes, flags): the words before the first flag, and the rest.

    Raises:
        ConfigError: a recipe stands behind a flag.
    """
    first = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    recipes, flags = list(argv[:first]), list(argv[first:])
    late = [
        Problem(word, "it behind a flag", "recipes before all flags", f"write {word} {flags[0]} ...")
        for before, word in itertools.pairwise(flags)
        if word.endswith(".toml") and not word.startswith("--") and "=" not in word
        if not recipes or not before.startswith("--")  # beside a recipe it may be a flag's own value
    ]
    if late:
        raise ConfigError(late)
    return recipes, flags


def read_stages(argv: Sequence[str], registry: Registry) -> list[Stage]:
    """Read the runs that `RECIPE... [--flag value]...` is; hook modules that are left out are named on standard error.

    Raises:
        ConfigError: carries every problem.
    """
    from slime_core.config.load import load_stages

    for distribution, why in registry.broken_hooks.items():
        print(f"warning: the hooks of {distribution} are left out: {why}", file=sys.stderr)
    recipes, flags = split(argv)
    return load_stages(recipes, flags, registry=registry)


def wide_console() -> Console:
    """Return a console on standard output that gives tables the room they need when the output is a file or a pipe."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=200)
