"""What the subcommands share: recipes and flags from the command line."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import DASHES, shown, why_not_text

if TYPE_CHECKING:
    from rich.console import Console

    from slime_core.config.parsing.translation import Translation
    from slime_core.config.stages import Stage
    from slime_core.plugins.registry import Registry


#: Characters of the name of a folder that a message shows.
_LONGEST = 300


def wants_help(argv: Sequence[str]) -> bool:
    """Say whether help is asked for."""
    return "--help" in argv or "-h" in argv


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (recipes, flags): the words before the first flag, and the rest.

    Raises:
        ConfigError: a recipe stands behind a flag.
    """
    for number, word in enumerate(argv, start=1):
        if why := why_not_text(word):
            raise ConfigError(
                [Problem(f"word {number} of the command", f"{shown(word)}, with {why}", "text")]
            )
    first = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    recipes, flags = list(argv[:first]), list(argv[first:])
    if dashed := next((word for word in recipes if _is_dashed(word)), None):
        raise ConfigError([Problem(dashed, "a dash before a recipe", "two hyphens before a flag: --lr 1e-6")])
    late = [
        Problem(word, "it behind a flag", "recipes before all flags", f"write {word} {flags[0]} ...")
        for before, word in itertools.pairwise(flags)
        if word.endswith(".toml") and not word.startswith("--") and "=" not in word
        if not recipes or not before.startswith("--")  # beside a recipe it may be a flag's own value
    ]
    if late:
        raise ConfigError(late)
    return recipes, flags


def _is_dashed(word: str) -> bool:
    """Return whether a word in the place of a recipe is rather a flag, behind one hyphen or what was made of two."""
    return word.lstrip(DASHES) != word and not os.path.exists(word)


def read_stages(argv: Sequence[str], registry: Registry) -> list[Stage]:
    """Read the runs of `RECIPE... [--flag value]...`.

    Raises:
        ConfigError: carries every problem with how they are written.
    """
    from slime_core.config.load import load_stages

    recipes, flags, translation = _words(argv, registry)
    return load_stages(recipes, flags, registry=registry, translation=translation)


def read_checked(
    argv: Sequence[str], registry: Registry, *, to_train: bool = False, only_last: bool = False
) -> list[Stage]:
    """Read the runs of `RECIPE... [--flag value]...`, and check them without starting anything.

    Args:
        argv: as typed.
        registry: the installed plugins.
        to_train: whether they are to be trained, which takes a trainer.
        only_last: return and check the last stage alone, as a run of its own.

    Raises:
        ConfigError: carries every problem, of how they are written and of what they mean.
    """
    from slime_core.checks.settings import check_stages
    from slime_core.config.load import read_runs

    recipes, flags, translation = _words(argv, registry)
    stages, problems = read_runs(recipes, flags, registry=registry, translation=translation)
    stages = stages[-1:] if only_last else stages
    problems += check_stages(stages, registry, to_train=to_train, is_translated=translation is not None)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return stages


def translation_of(argv: Sequence[str], registry: Registry) -> Translation | None:
    """Return what an installed plugin makes of a command line that was written for another program; None for one of slime's own."""
    found: Translation | None = registry.hooks.slime_translate(words=argv, registry=registry)
    return found


def _words(argv: Sequence[str], registry: Registry) -> tuple[list[str], list[str], Translation | None]:
    """Return recipes and flags, and what they were translated from; hook modules that are left out are named on standard error.

    Variables of the environment that the command line gives are set.
    """
    for distribution, why in registry.broken_hooks.items():
        print(f"warning: the hooks of {distribution} are left out: {why}", file=sys.stderr)
    translation = translation_of(argv, registry)
    if translation is None:
        return *split(argv), None
    for warning in translation.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for name, value in translation.environment.items():
        os.environ.setdefault(name, value)
    recipes, flags = split([*translation.recipes, *translation.flags])
    return recipes, flags, translation


def no_run(command: str, folder: Path, *, lacks: str) -> Problem:
    """Return what is wrong with a folder that has no `lacks`, which that of a run has, and which ones near it do."""
    near = [folder, folder.parent, Path("runs")]
    runs = [
        path.parent for place in near if os.path.isdir(place) for path in sorted(place.glob(f"*/{lacks}"))
    ]
    hint = (
        f"runs that are there: {', '.join(dict.fromkeys(map(str, runs)))}"
        if runs
        else "slime train makes one"
    )
    state = f"has no {lacks}" if os.path.exists(folder) else "does not exist"
    named = str(folder) if len(str(folder)) <= _LONGEST else f"{str(folder)[:_LONGEST]}..."
    return Problem(command, f"{named}, which {state}", "the folder of a run", hint)


def wide_console() -> Console:
    """Return a console on standard output that gives tables the room they need when the output is a file or a pipe."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=200)
