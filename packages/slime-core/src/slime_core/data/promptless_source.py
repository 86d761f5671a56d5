"""The data source of `--disable-rollout-global-dataset`: groups of samples without a prompt, for code that brings its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import CheckpointError
from slime_core.samples import Group, Sample


class PromptlessSource:
    """Endless groups of samples without prompt, label and metadata; satisfies `protocols.DataSource`.

    Ids rise as those of `PromptSource` do. A generator, or a rollout function, fills prompt and ids; what it fills in may
    depend on `group_index` and `index`, which a resumed run goes on counting.

    Args:
        n_samples_per_prompt: samples of a group.
    """

    def __init__(self, n_samples_per_prompt: int) -> None:
        self._n_samples = n_samples_per_prompt
        self._taken = 0

    def __len__(self) -> int:
        """Return 0: there is no end."""
        return 0

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups."""
        numbers = range(self._taken, self._taken + n_groups)
        self._taken += n_groups
        n = self._n_samples
        return [[Sample(index=number * n + i, group_index=number) for i in range(n)] for number in numbers]

    def state(self) -> dict[str, Any]:
        """Return how many groups were taken, and of how many samples."""
        return {"taken": self._taken, "n_samples_per_prompt": self._n_samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the groups that were taken.

        Raises:
            CheckpointError: the groups were of another size, so that ids would stand twice.
        """
        if state["n_samples_per_prompt"] != self._n_samples:
            raise CheckpointError(
                f"source state: groups of {state['n_samples_per_prompt']} samples were taken, this run has "
                f"{self._n_samples}; go on with --n-samples-per-prompt {state['n_samples_per_prompt']}"
            )
        self._taken = int(state["taken"])
