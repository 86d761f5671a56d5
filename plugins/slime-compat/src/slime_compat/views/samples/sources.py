"""Data sources as they are there: the abstract class, and the run's prompts behind it.

A class of a user's own derives from one of these, is built with `args`, and is asked for groups, `get_samples(n)`.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_core.data.prompt_source import PromptSource
from slime_core.errors import SampleError

from slime_compat.views.running.building import building
from slime_compat.views.samples.dataset import Dataset
from slime_compat.views.samples.sample import ReferenceSample as Sample
from slime_compat.views.samples.sample import viewed, viewed_groups


class AbstractSource(abc.ABC):
    """Where prompts come from."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return `num_samples` groups of pending samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the position to `args.save`."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a position that `save` wrote."""

    def __len__(self) -> int:
        """Return the number of prompts; 0 where there is no end."""
        return 0


class RolloutDataSource(AbstractSource):
    """The prompts of `--prompt-data`, in the run's order; without a data set, empty samples.

    Args:
        args: of the run.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.metadata: dict[str, Any] = {}
        self.epoch_id, self.sample_group_index, self.sample_index, self.sample_offset = 0, 0, 0, 0
        self._source: Any = None
        self.dataset: Dataset | None = None
        if args.rollout_global_dataset and args.prompt_data:
            self._source = building().prompts()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups."""
        if self._source is not None:
            groups: list[list[Sample]] = self._source.take(num_samples)
            for group in groups:
                for sample in group:
                    if isinstance(sample.prompt, str) and not sample.multimodal_inputs:
                        sample.tokens = []
            viewed_groups(groups)
        else:
            groups = [[Sample() for _ in range(self.args.n_samples_per_prompt)] for _ in range(num_samples)]
            for group in groups:
                for sample in group:
                    sample.group_index, sample.index = self.sample_group_index, self.sample_index
                    self.sample_index += 1
                self.sample_group_index += 1
        self.sample_offset += num_samples
        if isinstance(self._source, PromptSource):
            self.epoch_id = self._source.epoch
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Refuse.

        Raises:
            SampleError: always.
        """
        raise SampleError(
            f"{type(self).__name__} takes no groups back; derive from RolloutDataSourceWithBuffer"
        )

    def save(self, rollout_id: int) -> None:
        """Write the position."""
        path = self._file(rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.checkpoint_state()))

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a position."""
        self.restore_checkpoint_state(
            json.loads(self._file(0 if rollout_id is None else rollout_id).read_text())
        )

    @property
    def saves_itself(self) -> bool:
        """Whether `save` and `load` are a class's own: then it alone knows where it is."""
        return type(self).save is not RolloutDataSource.save or type(self).load is not RolloutDataSource.load

    def __len__(self) -> int:
        """Return the number of prompts."""
        return 0 if self._source is None else len(self._source)

    def _file(self, rollout_id: int) -> Path:
        return Path(self.args.save) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the position: JSON values."""
        names = ("epoch_id", "sample_group_index", "sample_index", "sample_offset", "metadata")
        state = {name: getattr(self, name) for name in names}
        return state if self._source is None else state | {"source": self._source.state()}

    def restore_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `checkpoint_state` returned."""
        own = dict(state)
        if self._source is not None:
            self._source.restore(own.pop("source"))
        for name, value in own.items():
            setattr(self, name, value)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, and a buffer of groups, which are taken first."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.buffer_filter: Callable[..., list[list[Sample]]] = pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups of the buffer, then the next ones of the data."""
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Put groups into the buffer.

        Raises:
            SampleError: one has another number of samples than a prompt gets.
        """
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                raise SampleError(
                    f"add_samples: a group of {len(group)} samples; wanted {self.args.n_samples_per_prompt}, n_samples_per_prompt"
                )
        self.buffer += samples

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep values."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the values that are kept."""
        return self.metadata

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the position, with the groups that wait."""
        return super().checkpoint_state() | {
            "buffer": [[one.to_dict() for one in group] for group in self.buffer]
        }

    def restore_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position, with the groups that waited."""
        super().restore_checkpoint_state(state)
        self.buffer = [[viewed(Sample.from_dict(one)) for one in group] for group in self.buffer]  # type: ignore[arg-type]  # dicts


def pop_first(
    args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Take the groups that came first."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
