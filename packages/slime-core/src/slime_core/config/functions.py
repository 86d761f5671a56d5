"""Plugin functions with their options filled in from settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slime_core.config.settings import Settings
from slime_core.config.user_factories import naming
from slime_core.errors import PluginError
from slime_core.plugins.bind import bind, choose_options
from slime_core.plugins.registry import Registry


class Resolve(Protocol):
    """Finds a plugin function by group and name, with its options bound; a plugin function's option `resolve` is one."""

    def __call__(
        self, group: str, reference: str, *, where: str, explicit: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return the function; `explicit` are options that the setting `where` gives."""


def resolve_function(
    settings: Settings,
    registry: Registry,
    group: str,
    reference: str,
    *,
    where: str,
    explicit: Mapping[str, Any],
    flag: str | None = None,
) -> Callable[..., Any]:
    """Return a plugin function with its options bound from its `*_args` table and its distribution's sections.

    A decorator that adds options to functions of others says by their attribute `options_from` (option -> distribution) whose
    sections hold these.

    Where a group takes a class in place of a function, what is returned is an object of the class, built from the options.

    One that itself chooses plugins by name takes an option `resolve`, which is this function for the same settings. One that was
    written for another system has no options: it gets the run's settings as that system gives them (`plugins.adapter`).

    Args:
        settings: of the run.
        registry: the installed plugins.
        group: the entry-point group.
        reference: what chooses the function.
        where: setting that holds `explicit`, for messages.
        explicit: the slot's table.
        flag: by which it was chosen, where a group's flags call otherwise.

    Raises:
        PluginError: it is not found, cannot be called as its group is, or does not take its options.
    """
    plugin = registry.find(group, reference)
    adapter = registry.adapter(plugin, flag=flag)
    if adapter is not None:
        refuse_options(reference, explicit, where=where)
        return adapter.build(run_args(settings))  # type: ignore[no-any-return]  # what a user's function returns is checked later
    function = registry.load(plugin, flag=flag)
    resolve: Resolve = functools.partial(resolve_function, settings, registry)
    section = {"resolve": resolve} | _section_values(settings, function, plugin.distribution)
    bound = bind(function, choose_options(function, where=where, explicit=explicit, section=section))
    call = registry.groups[plugin.group].call
    if call is None or not call.or_class or not inspect.isclass(function):
        return bound
    with naming(registry, group, reference, where=where):
        built: Callable[..., Any] = bound()
    return built


def _section_values(settings: Settings, function: Callable[..., Any], distribution: str) -> dict[str, Any]:
    """Return the values of sections from which a function's options come, by option."""
    lenders: Mapping[str, str] = getattr(function, "options_from", {})
    lent = {name: settings.section_of(lender) for name, lender in lenders.items()}
    return {name: values[name] for name, values in lent.items() if name in values} | settings.section_of(
        distribution
    )


def resolve_plain(
    settings: Settings, registry: Registry, group: str, reference: str, *, flag: str | None = None
) -> Callable[..., Any]:
    """Return a plugin function that has no options; raises as `resolve_function` does."""
    plugin = registry.find(group, reference)
    adapter = registry.adapter(plugin, flag=flag)
    found: Callable[..., Any] = (
        registry.load(plugin, flag=flag) if adapter is None else adapter.build(run_args(settings))
    )
    return found


def refuse_options(reference: str, explicit: Mapping[str, Any], *, where: str) -> None:
    """Refuse options of a function that was written for another system.

    Raises:
        PluginError: there are some.
    """
    if explicit:
        raise PluginError(
            f"{where}: found the keys {', '.join(explicit)}; {reference} was written for another system and takes no options: it "
            "reads settings, as that system gives them"
        )


def run_args(settings: Settings) -> dict[str, Any]:
    """Return every setting of a run as a plain value, by its flag's name without dashes, words joined by underscores.

    A plugin's setting stands there by its own name, too, where no other setting has that.
    """
    values: dict[str, Any] = {}
    for table, section in settings.sections.items():
        fields = section.model_dump(mode="json")
        if settings.owners[table] == "slime-core":
            values |= fields
        else:
            values = fields | {f"{table}_{name}": value for name, value in fields.items()} | values
    return values
