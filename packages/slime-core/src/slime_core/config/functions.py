"""Plugin functions with their options filled in from settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slime_core.config.settings import Settings
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
) -> Callable[..., Any]:
    """Return a plugin function with its options bound from its `*_args` table and its distribution's sections.

    Where a group takes a class in place of a function, what is returned is an object of the class, built from the options.

    One that itself chooses plugins by name takes an option `resolve`, which is this function for the same settings.
    """
    plugin = registry.find(group, reference)
    function = registry.load(plugin)
    resolve: Resolve = functools.partial(resolve_function, settings, registry)
    section = {"resolve": resolve} | settings.section_of(plugin.distribution)
    bound = bind(function, choose_options(function, where=where, explicit=explicit, section=section))
    call = registry.groups[plugin.group].call
    if call is None or not call.or_class or not inspect.isclass(function):
        return bound
    built: Callable[..., Any] = bound()
    return built
