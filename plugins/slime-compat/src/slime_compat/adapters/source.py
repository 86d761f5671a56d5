"""`ReferenceSource`: a data source class of the reference system as one of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.derive import run_folder
from slime_core.config.functions import run_args
from slime_core.errors import DataError
from slime_core.protocols import DataSource
from slime_core.samples import Group, Sample

from slime_compat.adapters.calling import Theirs
from slime_compat.views.running.building import built_for
from slime_compat.views.running.namespace import Args
from slime_compat.views.samples.sources import RolloutDataSource

_METHODS = ("get_samples",)


class ReferenceSource:
    """Builds `cls(args)` for a run.

    Args:
        path: `module:attribute`.
        run_args: settings of the run; the run says them, too.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.sources", path, run_args)

    def __call__(self, build: BuildContext) -> DataSource:
        """Return the source.

        Raises:
            DataError: the class lacks a method.
        """
        args = Args(
            run_args(build.settings),
            save=str(run_folder(build.settings)),
            load=str(run_folder(build.settings)),
        )
        with built_for(build):
            theirs = self._theirs.function(args)
        if missing := [name for name in _METHODS if not callable(getattr(theirs, name, None))]:
            raise DataError(
                f"{self._theirs.who}: has no method {missing[0]}; wanted a class with get_samples(num_samples)"
            )
        return SourceOfTheirs(theirs, build, who=self._theirs.who)


class SourceOfTheirs:
    """A data source of the reference system; satisfies `slime_core.protocols.DataSource`.

    Prompts that come as text get their ids from the run's tokenizer. The position of a `RolloutDataSource` is part of a checkpoint; that of
    a class with `save` and `load` of its own is what these write, under the number of groups that were taken; one without such a
    method begins anew when a run is resumed.

    Args:
        theirs: object of the user's class.
        build: of the run.
        who: how messages call it.
    """

    def __init__(self, theirs: Any, build: BuildContext, *, who: str) -> None:
        self._theirs, self._who, self._tokenizer = theirs, who, build.tokenizer
        self._n_samples = build.settings.rollout.n_samples_per_prompt
        self._taken = 0
        self._is_ours = isinstance(theirs, RolloutDataSource) and not theirs.saves_itself

    def __len__(self) -> int:
        """Return the number of prompts, 0 where it does not say."""
        try:
            return len(self._theirs)
        except TypeError:
            return 0

    def take(self, n_groups: int) -> list[Group]:
        """Return the next groups.

        Raises:
            DataError: it gave something else than so many groups of pending samples with numbers.
        """
        groups = self._theirs.get_samples(n_groups)
        if not isinstance(groups, Sequence) or len(groups) != n_groups:
            found = len(groups) if isinstance(groups, Sequence) else type(groups).__name__
            raise DataError(
                f"{self._who}: get_samples({n_groups}) returned {found}; wanted {n_groups} groups"
            )
        for group in groups:
            if not group or not all(isinstance(one, Sample) for one in group):
                raise DataError(f"{self._who}: get_samples returned a group that is no list of Samples")
            for sample in group:
                self._complete(sample)
        self._taken += n_groups
        return [list(group) for group in groups]

    def state(self) -> dict[str, Any]:
        """Return the position: how many groups were taken, and where the prompts are, or under which number the class wrote that."""
        if self._is_ours:
            return {"taken": self._taken, "position": self._theirs.checkpoint_state()}
        if callable(getattr(self._theirs, "save", None)):
            self._theirs.save(self._taken)
        return {"taken": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the groups that were taken."""
        self._taken = int(state["taken"])
        if "position" in state:
            self._theirs.restore_checkpoint_state(state["position"])
        elif callable(getattr(self._theirs, "load", None)):
            self._theirs.load(self._taken)

    def _complete(self, sample: Sample) -> None:
        if sample.index is None or sample.group_index is None:
            raise DataError(
                f"{self._who}: get_samples returned a sample without index or group_index; wanted both"
            )
        if not sample.tokens and isinstance(sample.prompt, str) and sample.prompt:
            sample.tokens = self._tokenizer.encode(sample.prompt)
