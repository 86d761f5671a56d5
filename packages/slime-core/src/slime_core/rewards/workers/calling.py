"""Loading a reward and calling it, alike in a worker and on the event loop."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.bind import arguments
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_core.rewards.workers.wire import Setup


def preloads[F: Callable[..., Any]](*steps: str) -> Callable[[F], F]:
    """Mark a reward with modules to import and functions to call when a worker starts, outside of any call's deadline.

    Args:
        steps: `module` to import, or `module:function` to call without arguments, as to fill caches.
    """

    def mark(function: F) -> F:
        function.preload = steps  # type: ignore[attr-defined]  # functions take attributes
        return function

    return mark


def import_reward(reference: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import `module:attr`, a function `reward(sample, **options)` or a class that is built from the options.

    Raises:
        PluginError: it does not import, or does not take the options.
        ConfigError: its settings object refuses the value of one.
    """
    try:
        target = import_object(reference)
    except IMPORT_FAILURES as error:
        raise PluginError(f"reward {reference}: does not import: {explain(error)}") from error
    if not callable(target):
        raise PluginError(f"reward {reference}: found {type(target).__name__}; wanted a function or a class")
    try:
        given = arguments(target, options)
        inspect.signature(target).bind(*([] if inspect.isclass(target) else [None]), **given)
    except TypeError as error:
        signature = inspect.signature(target)
        raise PluginError(
            f"reward {reference}: is called with a sample and the options {sorted(options)}, but its "
            f"signature is {signature} ({error}); options come from rm_args and the plugin's section"
        ) from error
    except ConfigError:
        raise
    except ValueError:
        pass  # a builtin without a signature; the call will tell
    return target  # type: ignore[no-any-return]  # checked to be callable above


def load(setup: Setup) -> Callable[..., Any]:
    """Import the reward of a worker, and do what it `preloads`.

    Raises:
        PluginError: something does not import, or the reward does not take its options.
    """
    target = import_reward(setup.reference, setup.options)
    for step in getattr(target, "preload", ()):
        try:
            found = import_object(step)
            if ":" in step:
                found()
        except IMPORT_FAILURES as error:
            raise PluginError(
                f"reward {setup.reference}: {step}, which it preloads, fails: {explain(error)}"
            ) from error
    return target


def build_reward(target: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return what scores a sample or a group: the function with its options, or an object of the class.

    Raises:
        PluginError: the class cannot be built.
        ConfigError: it refuses the value of an option.
    """
    given = arguments(target, options)
    if not inspect.isclass(target):
        return functools.partial(target, **given)
    try:
        scorer = target(**given)
    except (ConfigError, PluginError):  # say what to do already
        raise
    except IMPORT_FAILURES as error:
        raise PluginError(f"reward {target.__qualname__}: cannot be built: {explain(error)}") from error
    if not callable(scorer):
        raise PluginError(
            f"reward {target.__qualname__}: its objects cannot be called; wanted a method __call__"
        )
    return scorer


def is_async(target: Any) -> bool:
    """Return whether scoring with what `import_reward` returned gives a coroutine."""
    call = target.__call__ if not inspect.isroutine(target) else target
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(call)


def explain(error: BaseException) -> str:
    """Describe an error in one line: its type, its message, and the line of code that raised it."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # the error class is user code too
        text = "(its message cannot be shown)"
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be printed
    shown = text if len(text) <= 1000 else f"{text[:1000]}..."
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {shown}{where}" if shown else f"{type(error).__name__}{where}"
