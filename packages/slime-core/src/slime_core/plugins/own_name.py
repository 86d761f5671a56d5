"""Whether a setting means a certain plugin. Nothing is looked up: what the name means among others, the registry knows."""

from __future__ import annotations


def means(reference: str | None, *plugins: str) -> bool:
    """Return whether a setting means one of these plugins, by its name alone or with its distribution.

    A plugin that is named by an import reference, `module:attribute`, is taken for another one.

    Args:
        reference: what the setting says; None means no plugin.
        plugins: each as `distribution/name`.
    """
    return any(reference in (plugin, plugin.partition("/")[2]) for plugin in plugins)
