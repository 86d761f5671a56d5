"""The protocols `DataSource` and `Buffer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_core.samples import Group


class DataSource(Protocol):
    """Yields prompt groups in a fixed order; its position is part of a checkpoint."""

    def __len__(self) -> int:
        """Return the number of prompts of an epoch; 0 when there is no end."""

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups, each with `n_samples_per_prompt` fresh samples."""

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position that `state` returned."""


class Buffer(Protocol):
    """Groups that were taken from the source but not trained on yet: aborted or surplus ones.

    A buffer may have `snapshot()`, too, which returns a function that returns `state()` as it was then: it is asked for at every step,
    and called only where a checkpoint is written.
    """

    def __len__(self) -> int:
        """Return the number of groups held."""

    def put(self, groups: Sequence[Group]) -> None:
        """Add groups."""

    def take(self, n_groups: int) -> list[Group]:
        """Remove and return at most `n_groups` groups."""

    def state(self) -> dict[str, Any]:
        """Return the content, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a content that `state` returned."""
