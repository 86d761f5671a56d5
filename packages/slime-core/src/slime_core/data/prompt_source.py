"""`PromptSource`: a data source over a fixed sequence of prompts, and building it from settings."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import pickle
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config.build import BuildContext
from slime_core.errors import CheckpointError, ConfigError, DataError, Problem
from slime_core.samples import Group, Sample

logger = logging.getLogger(__name__)

#: Prompts of a data set that are built, and looked at, before a run starts; a smaller set is seen whole.
CHECKED = 10_000
#: Seeds between those of two sources that are shuffled side by side: far more than a run has epochs.
_SEEDS_APART = 1_000_003
#: Types whose values can be shared.
_CONSTANT = (str, int, float, bytes, type(None))
_FLAT = {*_CONSTANT, bool}


class PromptSource:
    """Endless prompt groups over a fixed sequence of prototypes; satisfies `protocols.DataSource`.

    Every group holds `n_samples_per_prompt` deep copies of one prototype, with a `group_index` and `index`
    that rise by one over the whole run. An epoch that ends rolls over into the next one, in the middle of a
    `take` if need be, as often as need be.

    With `shuffle`, epoch e sorts the prompts by the draws of `random.Random(seed + e).random()`, the one
    sequence that Python promises to keep across versions. The order of an epoch depends on nothing else, so a
    restored source continues exactly. It takes 8 bytes a prompt.

    A prompt of more than `max_prompt_len` tokens is passed over when its turn comes; the epoch's end says how many were.

    Args:
        prototypes: one picklable sample per prompt, which may be built when it is asked for; not changed by anybody.
        n_samples_per_prompt: samples of a group, at least 1; or those of each prompt.
        shuffle: visit the prompts in another order each epoch.
        seed: of the order.
        place: where a prompt stands, `train.jsonl:17`, for messages; its number when not given.
        max_prompt_len: most tokens of a prompt.
        digest: a hash of what prompts are made of, where they are built when they are asked for: of more than `CHECKED` the
            others are not looked at to recognise the data. Not given, all are.
    """

    def __init__(
        self,
        prototypes: Sequence[Sample],
        *,
        n_samples_per_prompt: int | Sequence[int],
        shuffle: bool = False,
        seed: int = 0,
        place: Callable[[int], str] = "prompt {}".format,
        max_prompt_len: int | None = None,
        digest: Callable[[], str] | None = None,
    ) -> None:
        if not len(prototypes):
            raise DataError("the data set has no prompt; wanted at least one")
        fewest = n_samples_per_prompt if isinstance(n_samples_per_prompt, int) else min(n_samples_per_prompt)
        if fewest < 1:
            raise DataError(f"n_samples_per_prompt is {fewest}; wanted at least 1")
        self._prototypes, self._place, self._digest = prototypes, place, digest
        self._max_prompt_len, self._n_passed_over = max_prompt_len, 0
        self._n_samples = n_samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._offset = 0
        self._group_index = 0
        self._index = 0
        self._order = self._order_of(0)
        self._hashes: tuple[str, str] | None = None
        self._rows: dict[int, int] = {}
        """Numbers of the prompts of the newest groups, by `group_index`."""

    def __len__(self) -> int:
        """Return the number of prompts of an epoch."""
        return len(self._prototypes)

    def prompts(self) -> Iterator[tuple[str, Sample]]:
        """Yield (place, prototype) of the prompts that are short enough, in the order of the data; not to be changed. With a
        `digest` the first `CHECKED` are looked at, otherwise all.

        Raises:
            DataError: one cannot be built, or all prompts are too long; names it.
        """
        too_long: list[int] = []
        for number, sample in self._looked_at():
            if self._is_short(number, sample):
                yield self._place(number), sample
            else:
                too_long.append(len(sample.tokens))
        if len(too_long) == len(self):
            raise self._all_too_long(min(too_long))

    @property
    def epoch(self) -> int:
        """Epoch of the prompt that comes next, from 0."""
        return self._epoch

    def place_of(self, group_index: int) -> str | None:
        """Return where the prompt of a group stands, for messages; None where it was not taken here, or `CHECKED` groups ago."""
        number = self._rows.get(group_index)
        return None if number is None else self._place(number)

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups; never fewer. Where one cannot be built, none is taken."""
        if n_groups < 0:
            raise ValueError(f"take: n_groups is {n_groups}; wanted 0 or more")
        before = (self._epoch, self._offset, self._group_index, self._index, self._n_passed_over, self._order)
        try:
            return [self._next_group() for _ in range(n_groups)]
        except BaseException:
            self._epoch, self._offset, self._group_index, self._index, self._n_passed_over, self._order = (
                before
            )
            raise

    def state(self) -> dict[str, Any]:
        """Return the position and what it is a position in, as JSON values."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "group_index": self._group_index,
            "index": self._index,
            "length": len(self),
            "content": self._content[0],
            "further_content": self._further_content,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state` returned.

        Raises:
            CheckpointError: the state is of another data set.
        """
        if "length" not in state and "n_samples_per_prompt" in state:  # a mixture's, or one without prompts
            raise CheckpointError(
                "source state: not taken over one file; resume with the prompt_data that the run began with"
            )
        if state["length"] != len(self):
            raise CheckpointError(
                f"source state: taken over {state['length']} prompts, this data set has {len(self)}; "
                "resume with the data set (and slice, and length filter) that the run began with"
            )
        if state["content"] not in self._content:  # an earlier version's was also of the limit on prompts
            raise CheckpointError(
                f"source state: taken over prompts with hash {state['content'][:12]}, this data set has {self._content[0][:12]}; resume "
                "with the data set and chat template that the run began with (and its rollout_max_prompt_len, if an earlier version saved it)"
            )
        if state.get("further_content") != self._further_content:
            logger.warning(
                "the rows beyond the first %d are not those that the run began with: prompts that come next may be others",
                CHECKED,
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
        number, prototype = self._next_prototype()
        copied = _copier(prototype)
        n = self._n_samples if isinstance(self._n_samples, int) else self._n_samples[number]
        group = [copied() for _ in range(n)]
        for sample in group:
            sample.group_index, sample.index = self._group_index, self._index
            self._index += 1
        self._rows[self._group_index] = number
        if len(self._rows) > CHECKED:
            del self._rows[next(iter(self._rows))]
        self._group_index += 1
        return group

    def _next_prototype(self) -> tuple[int, Sample]:
        """Return the next prompt that is short enough, and its number."""
        shortest: int | None = None
        for _ in range(len(self)):
            number = int(self._order[self._offset])
            sample = self._prototypes[number]
            is_short = self._is_short(number, sample)
            self._n_passed_over += not is_short
            self._advance()
            if is_short:
                return number, sample
            shortest = min(len(sample.tokens), shortest or len(sample.tokens))
        raise self._all_too_long(shortest)

    def _advance(self) -> None:
        self._offset += 1
        if self._offset < len(self):
            return
        if self._n_passed_over:
            logger.warning(
                "epoch %d, which ends with %s: dropped %d of %d prompts for having more than %d tokens (rollout_max_prompt_len)",
                self._epoch, self._place(len(self) - 1), self._n_passed_over, len(self), self._max_prompt_len,
            )  # fmt: skip
        self._epoch, self._offset, self._n_passed_over = self._epoch + 1, 0, 0
        self._order = self._order_of(self._epoch)

    def _is_short(self, number: int, sample: Sample) -> bool:
        most = self._max_prompt_len
        if most is None:
            return True
        return _is_within(most, sample, partial(self._place, number), "rollout_max_prompt_len")

    def _all_too_long(self, shortest: int | None) -> DataError:
        return DataError(
            f"all {len(self)} prompts have more than rollout_max_prompt_len {self._max_prompt_len} tokens, "
            f"the shortest {shortest}; raise the limit"
        )

    def _order_of(self, epoch: int) -> Sequence[int] | NDArray[np.int64]:
        if not self._shuffle:
            return range(len(self))
        generator = random.Random(self._seed + epoch)
        draws = np.fromiter((generator.random() for _ in range(len(self))), np.float64, len(self))
        return np.argsort(draws, kind="stable")

    def _looked_at(self) -> Iterator[tuple[int, Sample]]:
        """Yield (number, prototype) of the prompts that are built before a run starts; their hashes are known at the end."""
        digest, n = hashlib.sha256(), len(self) if self._digest is None else min(len(self), CHECKED)
        for number in range(n):
            sample = self._prototypes[number]
            text = json.dumps([sample.prompt, sample.label, sample.metadata], sort_keys=True, default=repr)
            digest.update(array("q", sample.tokens).tobytes() + text.encode())
            yield number, sample
        content = digest.hexdigest()
        if self._max_prompt_len is not None:
            digest.update(f"at most {self._max_prompt_len} tokens".encode())
        self._hashes = content, digest.hexdigest()

    @property
    def _further_content(self) -> str | None:
        """Hash of what the other prompts are made of; None where there are none."""
        return self._digest() if self._digest is not None and len(self) > CHECKED else None

    @property
    def _content(self) -> tuple[str, str]:
        """Hash of those prompts, in order; and that of them and the limit, which checkpoints of earlier versions have."""
        if self._hashes is None:
            for _ in self._looked_at():
                pass
        assert self._hashes is not None
        return self._hashes


def _copier(prototype: Sample) -> Callable[[], Sample]:
    """Return a function that gives deep copies of a sample, each in a fraction of the time of `copy.deepcopy`."""
    flat: list[tuple[str, Any]] = []
    deep: dict[str, Any] = {}
    for name, value in vars(prototype).items():
        if isinstance(value, _CONSTANT):
            continue
        if _is_flat(value):
            flat.append((name, value))
        else:
            deep[name] = value
    pickled = pickle.dumps(deep, protocol=pickle.HIGHEST_PROTOCOL) if deep else None

    def copied() -> Sample:
        sample = copy.copy(prototype)
        values = vars(sample)
        for name, value in flat:
            values[name] = value.copy()
        if pickled is not None:
            values.update(pickle.loads(pickled))
        return sample

    return copied


def _is_flat(value: Any) -> bool:
    """Return whether a shallow copy of a value is a deep one."""
    if type(value) is dict:
        return _FLAT.issuperset(map(type, value.values()))
    return type(value) is list and _FLAT.issuperset(map(type, value))


def _is_within(most: int, sample: Sample, place: Callable[[], str], setting: str) -> bool:
    """Return whether a prompt has at most so many tokens; raises DataError where it has no length yet."""
    if not sample.tokens:
        raise DataError(
            f"{place()}: chat messages that are not rendered have no length to hold against {setting} {most}; set "
            "apply_chat_template, or drop the limit"
        )
    return len(sample.tokens) <= most


#: Settings of evaluation that name files of prompts, or say what is in those.
_OF_EVAL_FILES = (
    "eval_prompt_data",
    "eval_config",
    "eval_input_key",
    "eval_label_key",
    "eval_tool_key",
    "eval_num_prompts",
)


def refuse_prompt_data(build: BuildContext, *, but: Sequence[str] = ()) -> None:
    """Refuse files of prompts, and what says how those are read, for a source that reads none: they would be ignored without a word.

    Args:
        build: says whether it is for training or for evaluation; settings of the other are left alone.
        but: settings of evaluation that the source does read.

    Raises:
        ConfigError: `prompt_data` is given; for evaluation `eval_prompt_data`, or another setting of evaluation sets in files.
    """
    data, evaluation = build.settings.data, build.settings.eval
    if build.evaluation:
        name, flag = evaluation.eval_data_source_path, "--eval-data-source-path"
        given = {f"eval.{one}": getattr(evaluation, one) for one in _OF_EVAL_FILES if one not in but}
    else:
        name, flag = data.data_source_path, "--data-source-path"
        given = {"data.prompt_data": data.prompt_data}
    wanted = f"none: the data source {name!r} has prompts of its own"
    problems = [
        Problem(where, repr(value)[:200], wanted, f"{flag} file reads the files")
        for where, value in given.items()
        if value
    ]
    if problems:
        raise ConfigError(problems)


def source_of(
    prototypes: Sequence[Sample],
    build: BuildContext,
    *,
    place: Callable[[int], str] = "prompt {}".format,
    digest: Callable[[], str] | None = None,
    seed_offset: int = 0,
    n_samples: Sequence[int] | None = None,
) -> PromptSource:
    """Return the source over these prompts that a run is to have: held-out ones in order, others as it shuffles.

    Held-out prompts of more tokens than `eval_max_prompt_len` are left out.

    Args:
        prototypes: one sample per prompt.
        build: says which of the two it is for.
        place: where a prompt stands, for messages.
        digest: see `PromptSource`.
        seed_offset: which of the sources of one run that are shuffled side by side.
        n_samples: of each held-out prompt; as settings say when not given.

    Raises:
        DataError: there are no prompts, or none is short enough, or one has no length yet.
    """
    if build.evaluation:
        section = build.settings.eval
        each, most = n_samples or section.n_samples_per_eval_prompt, section.eval_max_prompt_len
        if most is None or not len(prototypes):
            return PromptSource(prototypes, n_samples_per_prompt=each, place=place)
        kept = [
            number
            for number, sample in enumerate(prototypes)
            if _is_within(most, sample, partial(place, number), "eval_max_prompt_len")
        ]
        if not kept:
            raise DataError(
                f"all {len(prototypes)} held-out prompts have more than eval_max_prompt_len {most} tokens; raise the limit"
            )
        return PromptSource(
            [prototypes[number] for number in kept],
            n_samples_per_prompt=each if isinstance(each, int) else [each[number] for number in kept],
            place=lambda number: place(kept[number]),
        )
    rollout = build.settings.rollout
    return PromptSource(
        prototypes,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        shuffle=build.settings.data.rollout_shuffle,
        max_prompt_len=build.settings.data.rollout_max_prompt_len,
        digest=digest,
        seed=rollout.rollout_seed + seed_offset * _SEEDS_APART,
        place=place,
    )
