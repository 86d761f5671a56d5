"""Whether a process of the cluster has the plugins of the driver."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from slime_core.errors import PluginError
from slime_core.plugins.registry import HOOK_GROUP, Registry

#: The plugins that a driver resolved, as `Registry.lock` returns them.
Lock = Sequence[Mapping[str, str]]


def check_lock(registry: Registry, lock: Lock) -> None:
    """Check that the plugins of the driver are here, in the same versions.

    Args:
        registry: of this process.
        lock: of the driver.

    Raises:
        PluginError: one is not, or is of another version; names both.
    """
    own = {(one.group, one.name, one.distribution): one.version for one in registry.plugins()}
    own |= {(one.group, one.name, one.distribution): one.version for one in registry.plugins(HOOK_GROUP)}
    for plugin in lock:
        if not plugin["distribution"]:  # module:function, which this process imports when it needs it
            continue
        version = own.get((plugin["group"], plugin["name"], plugin["distribution"]))
        if version != plugin["version"]:
            here = "not there" if version is None else f"{plugin['distribution']} {version}"
            raise PluginError(
                f"{plugin['group']}: {plugin['name']!r} is {here} on {socket.gethostname()} and "
                f"{plugin['distribution']} {plugin['version']} where the run was started; "
                "install the same on every machine"
            )
