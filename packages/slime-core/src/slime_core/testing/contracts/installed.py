"""Checking an installed plugin: import, signature, and the kits of its group. What `slime plugins check` asks."""

from __future__ import annotations

import inspect
from concurrent.futures import TimeoutError as Late
from typing import Any

from slime_core.config.factories import EngineFactory, TrainerFactory, factory_misfit
from slime_core.errors import ContractError, PluginError
from slime_core.plugins.bind import options_of
from slime_core.plugins.groups import Call
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_core.plugins.registry import HOOK_GROUP, KIT_GROUP, Plugin, Registry
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.testing.contracts.kit import Kit

#: Characters of a plugin's own error that are shown.
_SHOWN = 60
_FACTORIES = {"slime.engines": EngineFactory, "slime.trainers": TrainerFactory}


def plugins_of(distribution: str) -> list[Plugin]:
    """Return the plugins that a distribution lists, its hook module included: what a test of its own is parametrised by."""
    registry = Registry()
    return [p for p in (*registry.plugins(), *registry.plugins(HOOK_GROUP)) if p.distribution == distribution]


def check_plugin(registry: Registry, plugin: Plugin) -> str | None:
    """Check an installed plugin as far as its kits need nothing else: import, signature, docstring, capabilities, behaviour.

    Returns:
        What was not tried and why; None where all was.

    Raises:
        ContractError: says which promise is broken.
    """
    if plugin.group == HOOK_GROUP and plugin.distribution in registry.broken_hooks:
        raise ContractError(registry.broken_hooks[plugin.distribution])
    try:
        value = registry.load(plugin)
    except PluginError as error:
        raise ContractError(str(error)) from error
    if not inspect.getdoc(value):
        raise ContractError("found no docstring; wanted one, which `slime plugins show` prints")
    if plugin.group in _FACTORIES and (why := factory_misfit(value, _FACTORIES[plugin.group])):
        raise ContractError(f"found {why}")
    left_out = [_tried(kit, registry, plugin, value) for kit in _kits(registry, plugin.group)]
    return "; ".join(why for why in left_out if why is not None) or None


def _kits(registry: Registry, group: str) -> list[Kit]:
    """Return the kits of a group of plugins."""
    try:
        return [import_object(reference) for reference in registry.kits(group)]
    except IMPORT_FAILURES as error:
        raise ContractError(f"{KIT_GROUP} {group}: a kit does not import: {error}") from error


def _tried(kit: Kit, registry: Registry, plugin: Plugin, value: Any) -> str | None:
    """Run a kit, unless the plugin cannot be called; returns what was not tried and why, None where all was."""
    why = _cannot_be_called(registry.groups[plugin.group].call, value)
    return _run(kit, plugin, value) if why is None else why


def _cannot_be_called(call: Call | None, value: Any) -> str | None:
    """Return why the behaviour of a function with options cannot be tried here."""
    if call is None or not call.takes_options:
        return None
    needed = [name for name, option in options_of(value).items() if option.default is inspect.Parameter.empty]
    if needed:
        return f"it needs the option {needed[0]!r}"
    if inspect.isclass(value):
        return "a class may start what it asks"
    if call.is_async is None and inspect.iscoroutinefunction(inspect.unwrap(value)):
        return "an async reward may ask a server"
    return None


def _run(kit: Kit, plugin: Plugin, value: Any) -> str | None:
    """Run a kit for so long at most, on a thread that the process does not wait for."""
    thread = DaemonThread(f"check of {plugin.qualified}")
    try:
        left_out: str | None = thread.submit(kit.check, value).result(timeout=kit.patience_s)
    except Late:
        return f"no answer within {kit.patience_s:g} s"
    except ContractError as error:
        if isinstance(error.__cause__, kit.refusals):
            return f"it takes other things than the kit's ({_short(error.__cause__)}); give yours to the kit in a test"
        raise
    finally:
        thread.shutdown(wait=False)
    return left_out


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"
