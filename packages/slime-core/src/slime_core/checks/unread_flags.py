"""Flags that would do nothing: nothing that is chosen reads them. A recipe may hold such settings, for runs of several kinds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import importlib_metadata

from slime_core.checks.chosen_plugins import chosen
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, Problem
from slime_core.plugins.hooks import Section
from slime_core.plugins.registry import Plugin, Registry

#: What chooses a plugin of a group, for messages.
_FLAGS = {
    "slime.engines": "--rollout-engine",
    "slime.generators": "--custom-generate-function-path",
    "slime.launchers": "--launcher",
    "slime.rewards": "--rm-type",
    "slime.sources": "--data-source-path",
    "slime.trackers": "--tracker",
    "slime.trainers": "--train-backend",
}


def unread_flags(stages: Sequence[Settings], registry: Registry) -> Iterator[Problem]:
    """Yield the flags of plugins' sections that are read in none of a recipe's stages for which they were given.

    Plugins tell of more by the hook `slime_check_flags`.
    """
    told = [{p.where: p for p in _of_one_run(settings, registry)} for settings in stages]
    typed = [{".".join(key) for key in _typed(settings)} for settings in stages]
    for where, problem in {where: p for problems in told for where, p in problems.items()}.items():
        if all(where in told[i] for i, flags in enumerate(typed) if where in flags):
            yield problem


def _typed(settings: Settings) -> list[tuple[str, str]]:
    """Return (table, field) of what flags gave."""
    return [key for key, origin in settings.origins.items() if origin.startswith("--")]


def _of_one_run(settings: Settings, registry: Registry) -> Iterator[Problem]:
    if not (typed := _typed(settings)):
        return
    try:
        plugins = {
            registry.find(choice.group, choice.reference): choice for choice in chosen(settings, registry)
        }
        if any(registry.adapter(plugin, flag=choice.flag) for plugin, choice in plugins.items()):
            return  # a function that was written for another system is handed all settings
    except PluginError:  # which is told by itself, and may be what would read them
        return
    sections = {s.name: s for added in registry.hooks.slime_config_sections() for s in added}
    for table, field in typed:
        section = sections.get(table)
        if section is None or section.read_by is None:
            continue
        readers = [
            p for p in registry.plugins() if p.distribution == settings.owners[table] and _reads(p, section)
        ]
        if readers and not any(_may_be_one(plugin, readers) for plugin in plugins):
            yield Problem(
                f"{table}.{field}",
                f"{settings.origin(table, field)}, which nothing that is chosen reads",
                f"{_choices(readers)}, or not this flag",
            )
    for problems in registry.hooks.slime_check_flags(settings=settings, registry=registry):
        yield from problems


def _reads(plugin: Plugin, section: Section) -> bool:
    return not section.read_by or plugin.name in section.read_by


def _may_be_one(plugin: Plugin, readers: Sequence[Plugin]) -> bool:
    """Say whether a plugin is one of the readers, or may be made of one: a user's own, or of a distribution that requires theirs."""
    if plugin in readers:
        return True
    if plugin.group not in {reader.group for reader in readers}:
        return False
    return not plugin.distribution or readers[0].distribution in _required_by(plugin.distribution)


@functools.cache
def _required_by(distribution: str) -> frozenset[str]:
    """Return the names of the distributions that an installed one requires."""
    try:
        required = importlib_metadata.requires(distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return frozenset()
    return frozenset(re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in required)


def _choices(plugins: Sequence[Plugin]) -> str:
    """Return the flags that choose the plugins, each with their names."""
    by_flag: dict[str, list[str]] = {}
    for plugin in plugins:
        if plugin.group in _FLAGS:
            by_flag.setdefault(_FLAGS[plugin.group], []).append(plugin.name)
    told = ", ".join(f"{flag} {' or '.join(names)}" for flag, names in by_flag.items())
    return told or f"something of {plugins[0].distribution}"
