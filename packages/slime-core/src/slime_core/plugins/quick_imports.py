"""Imports of large packages that take less time: little garbage is collected, and what is installed is read from its records."""

from __future__ import annotations

import contextlib
import csv
import gc
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

#: Objects that are made between two collections while a module is imported.
_YOUNG = 50_000


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Have the block, which imports something large, take less time.

    It collects garbage seldom: modules leave next to none, and collections are a sixth of what torch, Megatron and transformers
    take to import. What transformers asks as it is imported, which distributions a package is of, is read from their records
    (`recorded_packages`).
    """
    threshold, by_looking = gc.get_threshold(), metadata.packages_distributions
    gc.set_threshold(_YOUNG, *threshold[1:])
    metadata.packages_distributions = recorded_packages
    try:
        yield
    finally:
        metadata.packages_distributions = by_looking
        gc.set_threshold(*threshold)


def recorded_packages() -> dict[str, list[str]]:
    """Return the distributions of each package that is installed, by its name, as `metadata.packages_distributions` does.

    That one looks on the disk for every file of every distribution, this for the topmost ones, in a quarter of the time.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in metadata.distributions():
        name = distribution.name
        for package in _packages_of(distribution):
            found[package].append(name)
    return dict(found)


def _packages_of(distribution: metadata.Distribution) -> Iterable[str]:
    if declared := (distribution.read_text("top_level.txt") or "").split():
        return declared
    files = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    tops = {(top, bool(inside)) for top, inside, _ in (file[0].partition("/") for file in files if file)}
    names = {
        top if is_folder else inspect.getmodulename(top)
        for top, is_folder in tops
        if Path(str(distribution.locate_file(top))).exists()
    }
    return [name for name in names if name and "." not in name]
