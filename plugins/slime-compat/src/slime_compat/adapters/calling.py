"""`Theirs`: a user's function of the reference system, with its `args`, and errors that say whose they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_core.config.settings import Settings
from slime_core.errors import PluginError
from slime_core.plugins.importing import IMPORT_FAILURES, import_object

from slime_compat.adapters.attributes import unknown_attributes
from slime_compat.adapters.table import FORMS, fit
from slime_compat.adapters.whole import whole_sequences
from slime_compat.views.running.namespace import Args, known_names

#: Group of functions whose `args`, where ours have some, is the trainer's own.
_OF_TRAINER = "slime.megatron_hooks"


class Theirs:
    """What adapters share: the function, how it is called, and `args`.

    Args:
        group: of ours that it was chosen from.
        flag: that chose it, where a group's flags call otherwise.
        path: `module:attribute`.
        run_args: settings of the run; None where only the signature is looked at.

    Raises:
        PluginError: it cannot be called as the reference system does, or reads what `args` does not have here.
    """

    def __init__(
        self, group: str, path: str, run_args: Mapping[str, Any] | None, *, flag: str | None = None
    ) -> None:
        self.group, self.form = group, FORMS[group, flag]
        self.path = path
        try:
            self.function: Callable[..., Any] = import_object(path)
        except IMPORT_FAILURES as error:
            raise PluginError(f"{path}: does not import: {type(error).__name__}: {error}") from error
        if why := fit(self.form, self.function):
            raise PluginError(
                f"{self.form.flag} {path}: found {why}; wanted one that can be called as the reference system does: {self.form}"
            )
        self.args = Args(run_args)
        if run_args is not None:
            self._check_attributes(run_args)

    def _check_attributes(self, run_args: Mapping[str, Any]) -> None:
        """Refuse a function that reads attributes of `args` that are not there."""
        if self.group == _OF_TRAINER and not self.form.ours:
            return  # what ours gives such a function as `args` is the trainer's to say
        known = {*known_names(run_args), *(dir(Settings) if not self.form.ours else ())}
        unknown = unknown_attributes(self.function, frozenset(known))
        if unknown:
            name, where = next(iter(unknown.items()))
            raise PluginError(
                f"{self.form.flag} {self.path}: reads args.{name} ({where}), which is no setting here; "
                f"read it by getattr(args, {name!r}, ...) with what it is by default, or give it in --custom-config-path of a launch script, or --compat-custom-config"
            )

    def on_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with whole responses, of which Megatron's context-parallel ranks each hold a part."""
        with whole_sequences(self.function):
            return self.function(*args, **kwargs)

    @property
    def who(self) -> str:
        """How messages call it."""
        return f"{self.form.flag} {self.path}"

    def refuse(self, found: Any) -> PluginError:
        """Return the error of a function that returned something else than it should."""
        return PluginError(
            f"{self.who}: returned {type(found).__name__} {str(found)[:60]!r}; wanted {self.form.returns}"
        )
