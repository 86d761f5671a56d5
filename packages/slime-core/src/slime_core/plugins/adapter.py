"""`Adapter`: what makes a user's function that was written for another system callable as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.plugins.importing import import_object


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Names a class whose objects are called as a group of plugins is, and call the user's function in turn.

    A name, so that processes that need such an object, workers of rewards among them, make their own.
    """

    reference: str
    """`module:attribute` of the class. It takes the options, and `run_args`: what `config.functions.run_args` returns, or None
    where nothing but the signature is looked at."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments: plain values."""
    reads: frozenset[str] | None = None
    """Names among which are all settings that the function reads, with their table before them (`algos_gamma`) or without; None where
    it may read any."""

    def build(self, run_args: Mapping[str, Any] | None = None) -> Any:
        """Return the object.

        Raises:
            PluginError: the user's function cannot be called as the other system does; says how that calls it.
        """
        return import_object(self.reference)(**self.options, run_args=run_args)
