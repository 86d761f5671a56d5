"""`--custom-convert-samples-to-train-data-path`: a user's function that makes the training data of a step's samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import SampleError
from slime_core.samples import Sample, Status

_WHO = "the function of --custom-convert-samples-to-train-data-path"
#: Columns that it may return; those of the first line it has to.
_NEEDED = ("tokens", "response_lengths", "sample_indices")
_COLUMNS = (
    *_NEEDED,
    "rewards",
    "raw_reward",
    "truncated",
    "loss_masks",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_ids",
    "metadata",
)


@dataclass(frozen=True)
class Converted:
    """Samples as they are trained on."""

    samples: list[Sample]
    rewards: NDArray[np.float32] | None
    """[N] what is credited; None where the reward transform is to say it."""


def converted(function: Callable[..., Any], settings: Any, samples: Sequence[Sample]) -> Converted:
    """Call the function with all samples of a step, in their order; returns those to train on.

    It gets `(args, samples)` and returns a dict of lists of one length, an entry for each row: `tokens` (ids of prompt and
    response), `response_lengths` and `sample_indices` (of the sample that it is made of, which says prompt group and weights), and
    what it wants of `loss_masks`, `rollout_log_probs`, `teacher_log_probs` (lists of response_length), `rewards` (credited as
    they are), `raw_reward`, `truncated`, `rollout_ids` (rows with one number count once) and `metadata` (for the loss). A
    column that is left out is that of the sample, where the response is as long; of samples that one execution fanned out into,
    that of the one with the same tokens.

    Args:
        function: the user's.
        settings: its `args`.
        samples: of the step.

    Raises:
        SampleError: it raised, or returned something else; names the column.
    """
    try:
        data = function(settings, list(samples))
    except Exception as error:
        raise SampleError(f"{_WHO} raised {type(error).__name__}: {error}") from error
    _check(data)
    by_index: dict[int | None, list[Sample]] = {}
    for sample in samples:
        by_index.setdefault(sample.index, []).append(sample)
    rows = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    taken: set[int] = set()
    made = [_row(row, _source(row, by_index, number, taken), number) for number, row in enumerate(rows)]
    rewards = data.get("rewards")
    if rewards is None:
        return Converted(made, None)
    try:
        credited = np.asarray([float(one) for one in rewards], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise SampleError(f"{_WHO} returned rewards that are no numbers ({error})") from error
    if not np.isfinite(credited).all():
        raise SampleError(f"{_WHO} returned rewards that are not finite; wanted numbers")
    return Converted(made, credited)


def _check(data: Any) -> None:
    if not isinstance(data, Mapping):
        raise SampleError(f"{_WHO} returned {type(data).__name__}; wanted a dict of lists")
    if unknown := sorted(map(str, set(data) - set(_COLUMNS))):
        raise SampleError(
            f"{_WHO} returned the columns {', '.join(unknown)}; wanted some of {', '.join(_COLUMNS)}"
        )
    if missing := [name for name in _NEEDED if name not in data]:
        raise SampleError(f"{_WHO} returned no column {missing[0]!r}; wanted {', '.join(_NEEDED)} at least")
    lengths = {name: len(column) for name, column in data.items()}
    if len(set(lengths.values())) > 1 or not lengths["tokens"]:
        raise SampleError(
            f"{_WHO} returned columns of the lengths {lengths}; wanted one length, and a row at least"
        )


def _source(
    row: Mapping[str, Any], by_index: Mapping[int | None, list[Sample]], number: int, taken: set[int]
) -> Sample:
    """Return the sample that a row is made of; of several that one execution fanned out into, the next with its tokens."""
    index = int(row["sample_indices"])
    if index not in by_index:
        raise SampleError(
            f"{_WHO} returned the sample index {index}, of no sample of the step; wanted one that it was given"
        )
    siblings = by_index[index]
    if len(siblings) == 1:
        return siblings[0]
    fitting = [one for one in siblings if list(one.tokens) == list(row["tokens"])]
    if not fitting:
        raise SampleError(
            f"{_WHO} returned in row {number} the sample index {index}, which {len(siblings)} samples of one execution share, and "
            "tokens of none of them; wanted the tokens of the one that it is made of"
        )
    of = next((one for one in fitting if id(one) not in taken), fitting[0])
    taken.add(id(of))
    return of


def _row(row: Mapping[str, Any], of: Sample, number: int) -> Sample:
    """Return the sample of one row."""
    length = int(row["response_lengths"])
    same = length == of.response_length
    changes: dict[str, Any] = {
        "tokens": [int(token) for token in row["tokens"]],
        "response_length": length,
        "rollout_top_p_token_ids": of.rollout_top_p_token_ids if same else None,
        "rollout_top_p_token_offsets": of.rollout_top_p_token_offsets if same else None,
        "rollout_routed_experts": of.rollout_routed_experts if same else None,
        "environment_spans": of.environment_spans if same else [],
        "weight_versions": of.weight_versions if same else of.weight_versions[:1],
        "weight_version_starts": of.weight_version_starts if same else [0] * bool(of.weight_versions),
    }
    for column, field, kind in (
        ("loss_masks", "loss_mask", int),
        ("rollout_log_probs", "rollout_log_probs", float),
        ("teacher_log_probs", "teacher_log_probs", float),
    ):
        value = row.get(column)
        changes[field] = (
            (getattr(of, field) if same and column not in row else None)
            if value is None
            else [kind(one) for one in value]
        )
        if changes[field] is not None and len(changes[field]) != length:
            raise SampleError(
                f"{_WHO} returned {column} of {len(changes[field])} entries in row {number}, whose response_length is {length}"
            )
    if "raw_reward" in row:
        changes["reward"] = float(row["raw_reward"])
    if "truncated" in row:
        changes["status"] = Status.TRUNCATED if row["truncated"] else Status.COMPLETED
    if "rollout_ids" in row:
        changes["rollout_id"] = int(row["rollout_ids"])
    if "metadata" in row:
        changes["train_metadata"] = row["metadata"]
    return dataclasses.replace(of, **changes)
