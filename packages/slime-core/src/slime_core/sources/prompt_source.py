"""`PromptSource`: a fixed list of prompts as a data source, and its making from settings."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_core.build import BuildContext
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.errors import CheckpointError, DataError
from slime_core.sample import Group, Sample


class PromptSource:
    """Endless prompt groups over a fixed list of prototypes; satisfies `protocols.DataSource`.

    Every group holds `n_samples_per_prompt` deep copies of one prototype, with a `group_index` and `index`
    that rise by one over the whole run. An epoch that ends rolls over into the next one, in the middle of a
    `take` if need be, as often as need be.

    With `shuffle`, epoch e sorts the prompts by the draws of `random.Random(seed + e).random()`, the one
    sequence that Python promises to keep across versions. The order of an epoch depends on nothing else, so a
    restored source goes on exactly.

    Args:
        prototypes: one picklable sample per prompt; not changed by anybody from here on.
        n_samples_per_prompt: samples of a group, at least 1.
        shuffle: visit the prompts in another order each epoch.
        seed: of the order.
        places: where each prompt stands, `train.jsonl:17`, for messages; by number when not given.
    """

    def __init__(
        self,
        prototypes: Sequence[Sample],
        *,
        n_samples_per_prompt: int,
        shuffle: bool = False,
        seed: int = 0,
        places: Sequence[str] = (),
    ) -> None:
        if not prototypes:
            raise DataError("the data set has no prompt; wanted at least one")
        if n_samples_per_prompt < 1:
            raise DataError(f"n_samples_per_prompt is {n_samples_per_prompt}; wanted at least 1")
        self._prototypes = tuple(prototypes)
        self._places = tuple(places) or tuple(f"prompt {number}" for number in range(len(prototypes)))
        self._n_samples = n_samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._offset = 0
        self._group_index = 0
        self._index = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Return the number of prompts of an epoch."""
        return len(self._prototypes)

    def prompts(self) -> Iterator[tuple[str, Sample]]:
        """Yield (place, prototype) of each prompt, in the order of the data; not to be changed."""
        yield from zip(self._places, self._prototypes, strict=True)

    @property
    def epoch(self) -> int:
        """Epoch of the prompt that comes next, from 0."""
        return self._epoch

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups; never fewer."""
        if n_groups < 0:
            raise ValueError(f"take: n_groups is {n_groups}; wanted 0 or more")
        return [self._next_group() for _ in range(n_groups)]

    def state(self) -> dict[str, Any]:
        """Return the position and what it is a position in, as JSON values."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "group_index": self._group_index,
            "index": self._index,
            "length": len(self),
            "content": self._content,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position that `state` returned.

        Raises:
            CheckpointError: the state is of another data set.
        """
        if state["length"] != len(self):
            raise CheckpointError(
                f"source state: taken over {state['length']} prompts, this data set has {len(self)}; "
                "resume with the data set (and slice, and length filter) that the run began with"
            )
        if state["content"] != self._content:
            raise CheckpointError(
                f"source state: taken over prompts with hash {state['content'][:12]}, this data set has "
                f"{self._content[:12]}; resume with the data set and chat template that the run began with"
            )
        position = {name: state[name] for name in ("epoch", "offset", "group_index", "index")}
        if not all(type(at) is int and at >= 0 for at in position.values()) or position["offset"] >= len(
            self
        ):
            raise CheckpointError(
                f"source state: found {position}; wanted a position among {len(self)} prompts"
            )
        self._epoch, self._offset = position["epoch"], position["offset"]
        self._group_index, self._index = position["group_index"], position["index"]
        self._order = self._order_of(self._epoch)

    def _next_group(self) -> Group:
        prototype = pickle.dumps(
            self._prototypes[self._order[self._offset]], protocol=pickle.HIGHEST_PROTOCOL
        )
        group = [
            pickle.loads(prototype) for _ in range(self._n_samples)
        ]  # several times faster than deepcopy
        for sample in group:
            sample.group_index, sample.index = self._group_index, self._index
            self._index += 1
        self._group_index += 1
        self._offset += 1
        if self._offset == len(self):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return group

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self))
        generator = random.Random(self._seed + epoch)
        draws = [generator.random() for _ in self._prototypes]
        return sorted(range(len(self)), key=draws.__getitem__)

    @functools.cached_property
    def _content(self) -> str:
        """Hash of the prompts, in order."""
        digest = hashlib.sha256()
        for sample in self._prototypes:
            text = json.dumps([sample.prompt, sample.label, sample.metadata], sort_keys=True, default=repr)
            digest.update(array("q", sample.tokens).tobytes() + text.encode())
        return digest.hexdigest()


def source_of(
    prototypes: Sequence[Sample], build: BuildContext, *, places: Sequence[str] = ()
) -> PromptSource:
    """Return the source over these prompts that a run is to have: held-out ones in order, others as it shuffles.

    Args:
        prototypes: one sample per prompt.
        build: says which of the two it is for.
        places: where each prompt stands, for messages.
    """
    if build.evaluation:
        n_samples = build.section(EvalSection).n_samples_per_eval_prompt
        return PromptSource(prototypes, n_samples_per_prompt=n_samples, places=places)
    rollout = build.section(RolloutSection)
    return PromptSource(
        prototypes,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        shuffle=build.section(DataSection).rollout_shuffle,
        seed=rollout.rollout_seed,
        places=places,
    )
