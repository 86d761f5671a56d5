"""`Registry`: which plugins are installed, which one a name means, and its object.

Entry points are metadata: listing and resolving import nothing. A name is never guessed, renamed or shadowed.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import importlib_metadata
import pluggy

from slime_core.errors import PluginError
from slime_core.files.json_text import shown
from slime_core.plugins import index
from slime_core.plugins.adapter import Adapter
from slime_core.plugins.contract import breach
from slime_core.plugins.groups import GROUPS, Group
from slime_core.plugins.importing import IMPORT_FAILURES, import_object

#: Entry-point group of hook modules.
HOOK_GROUP = "slime"
#: Entry-point group of modules that specify hooks: slime-core's own, and those of packages that call more.
SPEC_GROUP = "slime.hookspecs"
#: Entry-point group of the groups that packages besides core have.
GROUP_GROUP = "slime.groups"
#: Entry-point group of contract kits, each named after the group of plugins that it is for: `rewards`.
KIT_GROUP = "slime.kits"
_NOT_CHOSEN = (HOOK_GROUP, SPEC_GROUP, GROUP_GROUP)
#: Environment variable with the distributions that may provide plugins, separated by commas.
ALLOW_LIST = "SLIME_PLUGINS"
#: Most names that a message lists.
_LISTED = 10


@dataclass(frozen=True, order=True)
class Plugin:
    """One thing that can be chosen: an entry point of an installed distribution, or an import reference."""

    group: str
    name: str
    distribution: str
    """Distribution that provides it; empty for an import reference."""
    version: str
    value: str
    """`module:attribute`."""

    @property
    def qualified(self) -> str:
        """The spelling that is never ambiguous: `distribution/name`, or the import reference itself."""
        return f"{self.distribution}/{self.name}" if self.distribution else self.value


class Registry:
    """The installed plugins.

    Args:
        entry_points: what is installed; read from the environment's metadata when not given.
        allow: distributions that may provide plugins besides slime-core; all when None.
    """

    def __init__(
        self,
        entry_points: Iterable[importlib_metadata.EntryPoint] | None = None,
        *,
        allow: Sequence[str] | None = None,
    ) -> None:
        points = importlib_metadata.entry_points() if entry_points is None else list(entry_points)
        self._broken_hooks: dict[str, str] = {}
        self.groups: dict[str, Group] = {group.name: group for group in GROUPS}
        """Name -> group, of core and of what is installed."""
        for point in points:
            if point.group == GROUP_GROUP:
                self._add_group(point)
        self._kits = [(f"slime.{point.name}", point.value) for point in points if point.group == KIT_GROUP]
        found = set(_plugins(points, {*self.groups, *_NOT_CHOSEN}))
        allowed = None if allow is None else {normal_name(name) for name in allow} | {"slime-core"}
        self._plugins = tuple(
            sorted(p for p in found if allowed is None or normal_name(p.distribution) in allowed)
        )
        self._resolved: dict[tuple[str, str], Plugin] = {}
        self._hooks: pluggy.PluginManager | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Build the registry of this process, minding the allow-list in `SLIME_PLUGINS`."""
        value = (os.environ if environ is None else environ).get(ALLOW_LIST)
        return cls(
            allow=None if value is None else [name.strip() for name in value.split(",") if name.strip()]
        )

    def plugins(self, group: str | None = None) -> tuple[Plugin, ...]:
        """Return the installed plugins, of one group or of all that can be chosen by name."""
        return tuple(
            p for p in self._plugins if (p.group not in _NOT_CHOSEN if group is None else p.group == group)
        )

    def find(self, group: str, reference: str) -> Plugin:
        """Return the plugin that `reference` means: `module:attr`, `a.b.attr`, `distribution/name` or a name.

        Raises:
            PluginError: none or several fit; says what is installed, and the nearest name.
        """
        self.check_group(group)
        plugin = self._find(group, reference)
        self._resolved[group, reference] = plugin
        return plugin

    def load(self, plugin: Plugin, *, flag: str | None = None) -> Any:
        """Import the plugin and return its object, which can be called as the plugin's group is.

        Args:
            plugin: as it was found.
            flag: by which it was chosen, where a group's flags call otherwise.

        Raises:
            PluginError: the import fails, the attribute is missing, or the object is not what its group wants.
        """
        value = self.usable(plugin, flag=flag)
        if plugin.group not in _NOT_CHOSEN and (why := breach(self.groups[plugin.group], value, flag=flag)):
            raise PluginError(f"{plugin.group} {plugin.qualified!r}: found {why.found}; wanted {why.wanted}")
        return value

    def usable(self, plugin: Plugin, *, flag: str | None = None) -> Any:
        """Import the plugin and return its object, or what calls it in its place where it was written for another system.

        Raises:
            PluginError: the import fails, the attribute is missing, or it cannot be called as that other system does.
        """
        adapter = self.adapter(plugin, flag=flag)
        return self.imported(plugin) if adapter is None else adapter.build()

    def adapter(self, plugin: Plugin, *, flag: str | None = None) -> Adapter | None:
        """Return what makes a user's own function callable as ours, if it was written for a system that some plugin knows.

        Args:
            plugin: as it was found; what is installed by name is ours.
            flag: by which it was chosen, where a group's flags call otherwise.

        Raises:
            PluginError: the import fails, or the attribute is missing.
        """
        if plugin.distribution or plugin.group in _NOT_CHOSEN:
            return None
        value = self.imported(plugin)
        found: Adapter | None = self.hooks.slime_adapt_plugin(
            group=plugin.group, flag=flag, reference=plugin.value, value=value
        )
        return found

    def imported(self, plugin: Plugin) -> Any:
        """Import the plugin and return its object, whatever it is.

        Raises:
            PluginError: the import fails, or the attribute is missing.
        """
        try:
            return import_object(plugin.value)
        except IMPORT_FAILURES as error:
            todo = "wanted module:attribute, of a module that is installed or in the working directory"
            if plugin.distribution:
                todo = "run `slime plugins check`"
            raise PluginError(
                f"{plugin.group} {shown(plugin.qualified)} ({plugin.value[:60]}) does not import: "
                f"{type(error).__name__}: {str(error)[:300]}; {todo}"
            ) from error

    def resolve(self, group: str, reference: str, *, flag: str | None = None) -> Any:
        """Find and load in one call."""
        return self.load(self.find(group, reference), flag=flag)

    def kits(self, group: str) -> list[str]:
        """Return the contract kits of a group of plugins, as `module:attribute`."""
        return [reference for name, reference in self._kits if name == group]

    def lock(self) -> list[dict[str, str]]:
        """Return what has been resolved so far and the hook modules, with versions, for `plugins.lock.json`."""
        answering = {p for p in self.plugins(HOOK_GROUP) if p.distribution not in self.broken_hooks}
        return [asdict(plugin) for plugin in sorted({*self._resolved.values()} | answering)]

    @property
    def hooks(self) -> pluggy.HookRelay:
        """The hooks of all installed plugins; hook modules with something wrong are left out (see `broken_hooks`)."""
        return self.hook_manager.hook

    @property
    def hook_manager(self) -> pluggy.PluginManager:
        """The pluggy manager that holds the hook modules, one a distribution, named after it."""
        if self._hooks is None:
            manager = pluggy.PluginManager("slime")
            for plugin in self.plugins(SPEC_GROUP):
                manager.add_hookspecs(self.load(plugin))
            for plugin in self.plugins(HOOK_GROUP):
                try:
                    register(manager, self.load(plugin), name=plugin.distribution)
                except (PluginError, ValueError) as error:
                    self._broken_hooks[plugin.distribution] = str(error)
            self._hooks = manager
        return self._hooks

    @property
    def broken_hooks(self) -> Mapping[str, str]:
        """Distribution -> why its hook module is left out."""
        _ = self.hook_manager
        return self._broken_hooks

    def check_group(self, name: str) -> None:
        """Check that there is such a group.

        Raises:
            PluginError: there is none; names those there are, or the distribution that brings it.
        """
        if name in self.groups:
            return
        home = index.home_of_group(name)
        near = difflib.get_close_matches(name, self.groups, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        todo = f"{hint}wanted one of {', '.join(self.groups)}"
        if home is not None:
            todo = f"install {home}, which brings it"
        raise PluginError(f"no such group: {name!r}; {todo}")

    def _add_group(self, point: importlib_metadata.EntryPoint) -> None:
        try:
            group = import_object(point.value)
        except IMPORT_FAILURES as error:
            self._broken_hooks["" if point.dist is None else point.dist.name] = f"group {point.name}: {error}"
        else:
            self.groups[group.name] = group

    def _find(self, group: str, reference: str) -> Plugin:
        if not reference:
            raise PluginError(
                f"{group}: found an empty name; wanted the name of a plugin, or module:attribute"
            )
        if ":" in reference:
            return Plugin(group, reference, "", "", reference)
        candidates = self.plugins(group)
        if "/" in reference:
            matches = [p for p in candidates if p.qualified == reference]
        else:
            matches = [p for p in candidates if p.name == reference]
        if len(matches) == 1:
            return matches[0]
        if matches:
            spellings = " or ".join(p.qualified for p in matches)
            raise PluginError(
                f"{group}: {reference!r} is provided by several distributions; write {spellings}"
            )
        if "." in reference and "/" not in reference:
            module, _, attribute = reference.rpartition(".")
            return Plugin(group, reference, "", "", f"{module}:{attribute}")
        raise PluginError(self._unknown(group, reference))

    def _unknown(self, group: str, reference: str) -> str:
        installed = {p.name for p in self.plugins(group)}
        others = sorted({p.group for p in self._plugins if p.name == reference and p.group != group})
        also = f" ({reference!r} exists in {', '.join(others)})" if others else ""
        return f"{group}: no plugin is named {shown(reference)}{also}; {_meant(group, reference, installed)}"


def _meant(group: str, reference: str, installed: Collection[str]) -> str:
    """Return what a message says of the plugin that was probably meant, or of what there is."""
    home = index.home_of_name(group, reference)
    if home is not None:
        return f"install {home}, which brings it"
    near = difflib.get_close_matches(reference, [*installed, *index.names(group)], n=1)
    if near and near[0] in installed:
        return f"did you mean {near[0]!r}?"
    if near:
        return f"did you mean {near[0]!r}? install {index.home_of_name(group, near[0])}, which brings it"
    if len(installed) <= _LISTED:
        return f"installed: {', '.join(sorted(installed)) or '(nothing)'}"
    return (
        f"`slime plugins list {group.removeprefix('slime.')}` shows the {len(installed)} that are installed"
    )


def _plugins(points: Iterable[importlib_metadata.EntryPoint], groups: Collection[str]) -> Iterator[Plugin]:
    """Yield what is in some groups; a distribution's metadata is read once."""
    known: dict[int, tuple[str, str]] = {}
    for point in points:
        if point.group not in groups:
            continue
        if id(point.dist) not in known:
            known[id(point.dist)] = ("", "") if point.dist is None else (point.dist.name, point.dist.version)
        yield Plugin(point.group, point.name, *known[id(point.dist)], point.value)


def register(manager: pluggy.PluginManager, plugin: Any, *, name: str) -> None:
    """Let a hook module, or an object, answer hooks: with all of its functions (or methods) or none.

    Raises:
        PluginError: a function is no hook, is not marked as one, or takes what its hook does not give.
        ValueError: another one of this name answers.
    """
    for key, value in inspect.getmembers(
        plugin, lambda one: inspect.isfunction(one) or inspect.ismethod(one)
    ):
        is_own = inspect.ismethod(value) or value.__module__ == getattr(plugin, "__name__", None)
        if is_own and key.startswith("slime_") and not hasattr(value, "slime_impl"):
            raise PluginError(
                f"{value.__module__}.{value.__qualname__}: found no mark; wanted @hookimpl before it"
            )
    try:
        manager.register(plugin, name=name)
        manager.check_pending()  # those before are checked: a hook that is none is this one's
    except pluggy.PluginValidationError as error:
        manager.unregister(name=name)
        known = ", ".join(key for key in vars(manager.hook) if key.startswith("slime_"))
        raise PluginError(f"{error}; the hooks are {known}") from error


def normal_name(distribution: str) -> str:
    """Return the name of a distribution as it is compared: however it is spelled in metadata."""
    return distribution.lower().replace("_", "-").replace(".", "-")
