"""`DataSourceView`: prompts and buffer of a run as a rollout function gets them there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slime_core.errors import SampleError
from slime_core.rollout.context import RolloutRun

from slime_compat.views.running.loop import on_loop
from slime_compat.views.samples.sample import ReferenceSample as Sample
from slime_compat.views.samples.sample import viewed_groups


class DataSourceView:
    """Groups of the run: those that wait in its buffer first, through the buffer filter, then new ones.

    Args:
        run: whose prompts they are.
        loop: of the run; groups are taken and put back on it, whoever asks.
    """

    def __init__(self, run: RolloutRun, loop: asyncio.AbstractEventLoop) -> None:
        self._run, self._loop = run, loop
        self._metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups of pending samples, `num_samples` of them; a prompt that is text has no ids yet."""
        groups = on_loop(lambda: self._run.take(num_samples), self._loop)
        viewed_groups(groups)
        for sample in (sample for group in groups for sample in group):
            if (
                sample.response_length == 0
                and isinstance(sample.prompt, str)
                and not sample.multimodal_inputs
            ):
                sample.tokens = []
        return groups  # type: ignore[return-value]  # they are views now

    def add_samples(self, samples: Sequence[Sequence[Sample]]) -> None:
        """Put groups into the buffer, as they are.

        Raises:
            SampleError: one is no list of samples.
        """
        groups = [list(group) for group in samples]
        for group in groups:
            if not group or not all(isinstance(one, Sample) for one in group):
                raise SampleError(
                    "add_samples: found a group that is no list of Samples; wanted list[list[Sample]]"
                )
        for sample in (sample for group in groups for sample in group):
            if not sample.tokens and isinstance(sample.prompt, str):
                sample.tokens = self._run.tokenizer.encode(sample.prompt)
        on_loop(lambda: self._run.put(groups), self._loop)  # type: ignore[arg-type]  # views are samples of ours

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep values for later calls of this process."""
        self._metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return what `update_metadata` was given."""
        return self._metadata

    def get_buffer_length(self) -> int:
        """Return the number of groups that wait in the buffer."""
        return len(getattr(self._run, "buffer", ()))

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(getattr(self._run, "source", ()))

    def save(self, rollout_id: int) -> None:
        """Do nothing: checkpoints of the run hold position and buffer."""

    def load(self, rollout_id: int | None = None) -> None:
        """Do nothing, as `save`."""
