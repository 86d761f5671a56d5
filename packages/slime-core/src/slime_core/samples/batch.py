"""`TrainBatch`: what a trainer receives, as flat numpy columns with offsets.

Columnar, because a batch of 1,024 samples of 32k tokens is over a gigabyte as Python integers, and because
Ray ships numpy arrays without copying them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import SampleError
from slime_core.samples.compact import FLOAT32, IDS, Floats, Ints, concatenated, dtype_of, is_compact, view
from slime_core.samples.reused_memory import ReusedMemory
from slime_core.samples.sample import Sample
from slime_core.samples.status import Status
from slime_core.samples.validation import LOG_PROB_SLACK, check_fields
from slime_core.samples.versions import UNKNOWN_VERSION, VersionSpans, version_spans


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The samples of one step. N samples, L tokens (prompt and response), T response tokens, all flat."""

    step: int
    """Number of the rollout-and-train cycle, from 1."""
    tokens: NDArray[np.int32]
    """[L] prompt ids, then response ids, sample after sample."""
    offsets: NDArray[np.int64]
    """[N + 1] sample i owns tokens[offsets[i]:offsets[i + 1]]."""
    response_offsets: NDArray[np.int64]
    """[N + 1] sample i owns entries response_offsets[i]:response_offsets[i + 1] of the [T] columns."""
    loss_mask: NDArray[np.float32]
    """[T] 1 where a token is trained on."""
    rollout_log_probs: NDArray[np.float32] | None
    """[T] the engine's log-probs; 0 on tokens that it did not generate."""
    teacher_log_probs: NDArray[np.float32] | None
    """[T] the teacher's log-probs."""
    rewards: NDArray[np.float32]
    """[N] rewards after the reward transform."""
    raw_rewards: NDArray[np.float32]
    """[N] rewards as scored."""
    sample_ids: NDArray[np.int64]
    """[N] `Sample.index`."""
    group_ids: NDArray[np.int64]
    """[N] `Sample.group_index`."""
    rollout_ids: NDArray[np.int64]
    """[N] execution; the loss counts executions, not samples."""
    truncated: NDArray[np.bool_]
    """[N] whether the response hit its length limit."""
    optimizer_steps: tuple[NDArray[np.int64], ...]
    """Positions of the samples of each optimizer step, in order; together they cover every sample once."""
    weights: NDArray[np.float32]
    """[T] share of each response token in the loss of its optimizer step (see `protocols.Reducer`)."""
    temperature: float
    """Rollout temperature; the trainer divides its logits by it."""
    weight_versions: VersionSpans | None = None
    """Which weights generated which response tokens; None where no sample says."""
    reward_parts: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """[N] each, by name: the parts of rewards that the estimator reads, after the reward transform."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns, by name: an array [N, ...] or [T, ...], or a list of N objects."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rewards)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each sample, prompt included."""
        return np.diff(self.offsets)

    @functools.cached_property
    def response_lengths(self) -> NDArray[np.int64]:
        """[N] response tokens of each sample."""
        return np.diff(self.response_offsets)

    @functools.cached_property
    def staleness(self) -> NDArray[np.int64]:
        """[T] steps between the weights that generated each token and those that the step trains.

        0 where the weights are not known of a token that is not trained on.

        Raises:
            SampleError: they are not known of one that is; names its sample.
        """
        versions = np.full(len(self.loss_mask), UNKNOWN_VERSION)
        if self.weight_versions is not None:
            versions = self.weight_versions.by_token()
        is_known = versions != UNKNOWN_VERSION
        if (unknown := np.flatnonzero(~is_known & (self.loss_mask > 0))).size:
            i = int(np.searchsorted(self.response_offsets, unknown[0], side="right")) - 1
            raise SampleError(
                f"sample {self.sample_ids[i]}: the weights of response token {unknown[0] - self.response_offsets[i]} are "
                "not known, and the staleness of tokens is asked for; wanted a weight version that is a number: give "
                "Sample.append_response the engine's, or drop the option"
            )
        return np.where(is_known, np.maximum(self.step - 1 - versions, 0), 0)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a batch that come from the samples alone."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    response_offsets: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    rollout_log_probs: NDArray[np.float32] | None
    teacher_log_probs: NDArray[np.float32] | None
    raw_rewards: NDArray[np.float32]
    sample_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    rollout_ids: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    weight_versions: VersionSpans | None
    reward_parts: dict[str, NDArray[np.float64]]
    extra: dict[str, Any]


def columns(
    samples: Sequence[Sample],
    *,
    reward_key: str | None = None,
    reward_parts: Sequence[str] = (),
    memory: ReusedMemory | None = None,
) -> Columns:
    """Lay finished samples out as columns.

    Args:
        samples: of one step.
        reward_key: entry of a reward dict that is the score.
        reward_parts: entries of reward dicts that become columns.
        memory: of the arrays; new memory when not given.

    Raises:
        SampleError: a sample is unfinished, breaks an invariant, has no finite reward or lacks a part of it, or
            lacks log-probs that others have, or has some that are not finite. Names the sample.
    """
    memory = memory or ReusedMemory()
    for sample in samples:
        _check_trainable(sample)
    response_offsets = _offsets([s.response_length for s in samples])
    tokens = _joined([s.tokens for s in samples], IDS, memory)
    if tokens.size and tokens.min() < 0:
        _find_bad(samples)
    raw = np.array([s.reward_value(reward_key) for s in samples], dtype=np.float32)
    if (bad := np.flatnonzero(~np.isfinite(raw))).size:
        raise SampleError(f"{samples[bad[0]].name}: reward is {raw[bad[0]]}; a reward must be finite")
    return Columns(
        tokens=tokens,
        offsets=_offsets([len(s.tokens) for s in samples]),
        response_offsets=response_offsets,
        loss_mask=_masks(samples, response_offsets, memory),
        rollout_log_probs=_per_token(samples, "rollout_log_probs", response_offsets, memory),
        teacher_log_probs=_per_token(samples, "teacher_log_probs", response_offsets, memory),
        raw_rewards=raw,
        sample_ids=np.array([s.index for s in samples], dtype=np.int64),
        group_ids=np.array([s.group_index for s in samples], dtype=np.int64),
        rollout_ids=_execution_ids(samples),
        truncated=np.array([s.status is Status.TRUNCATED for s in samples], dtype=np.bool_),
        weight_versions=version_spans(samples) if any(s.weight_versions for s in samples) else None,
        reward_parts={name: np.array([s.reward_part(name) for s in samples]) for name in reward_parts},
        extra=_extra(samples),
    )


def _masks(
    samples: Sequence[Sample], response_offsets: NDArray[np.int64], memory: ReusedMemory
) -> NDArray[np.float32]:
    """Return the loss mask of all samples, 0 on those that are removed."""
    mask = memory.empty(int(response_offsets[-1]), np.float32)
    mask.fill(1.0)
    for i in [i for i, s in enumerate(samples) if s.remove_sample or s.loss_mask is not None]:
        span = slice(response_offsets[i], response_offsets[i + 1])
        mask[span] = 0.0 if samples[i].remove_sample else samples[i].loss_mask
    return mask


def _extra(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return optional columns that at least one sample has values for.

    `train_metadata` and `rollout_routed_experts`: as the samples hold them. `rollout_top_p_tokens`: (ids, offsets) of each;
    see `Sample.rollout_top_p_token_ids`.
    """
    extra: dict[str, list[Any]] = {
        "train_metadata": [s.train_metadata for s in samples],
        "rollout_routed_experts": [s.rollout_routed_experts for s in samples],
        "rollout_top_p_tokens": [
            None
            if s.rollout_top_p_token_offsets is None
            else (s.rollout_top_p_token_ids, s.rollout_top_p_token_offsets)
            for s in samples
        ],
    }
    return {name: column for name, column in extra.items() if any(value is not None for value in column)}


def _check_trainable(sample: Sample) -> None:
    check_fields(sample, compact=False)
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
        raise SampleError(
            f"{sample.name}: status is {sample.status}; only completed or truncated samples are trained on"
        )
    if sample.index is None or sample.group_index is None:
        raise SampleError(f"{sample.name}: index and group_index must be set; a DataSource sets both")
    if sample.prompt_length < 1:
        raise SampleError(f"{sample.name}: has no prompt token; the first response token needs one before it")
    if sample.response_length < 1:
        raise SampleError(f"{sample.name}: has no response token")
    if sample.multimodal_inputs:
        raise SampleError(
            f"{sample.name}: its policy saw {sorted(sample.multimodal_inputs)}, which batches do not carry; evaluate it "
            "(slime eval), or train on text"
        )


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _per_token(
    samples: Sequence[Sample], name: str, response_offsets: NDArray[np.int64], memory: ReusedMemory
) -> NDArray[np.float32] | None:
    columns = [getattr(s, name) for s in samples]
    lacking = sum(column is None for column in columns)
    if lacking == len(columns):
        return None
    if lacking:
        raise SampleError(
            f"{samples[columns.index(None)].name}: has no {name}, other samples of the batch have"
        )
    column = _joined(columns, FLOAT32, memory)
    if column.size and not (column.min() > -np.inf and column.max() <= LOG_PROB_SLACK):
        _find_bad(samples)
        for at in np.flatnonzero(~np.isfinite(column)):  # beyond what 32 bits hold
            i = int(np.searchsorted(response_offsets, at, side="right")) - 1
            raise SampleError(
                f"{samples[i].name}: {name} of response token {at - response_offsets[i]} is {column[at]}; wanted a finite "
                "number"
            )
    return column


def _find_bad(samples: Sequence[Sample]) -> None:
    """Raise the error of the first sample with a number that is out of its range, if there is one."""
    for sample in samples:
        sample.check()


def _joined(columns: Sequence[Ints | Floats], typecode: str, memory: ReusedMemory) -> NDArray[Any]:
    """Return the columns of all samples, one after the other, in the type code's dtype."""
    if all(is_compact(column, typecode) for column in columns):
        return concatenated(columns, typecode, memory)  # type: ignore[arg-type]  # all are compact
    return np.concatenate([view(column, typecode) for column in columns], dtype=dtype_of(typecode))


def _execution_ids(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Number the executions: samples with the same `rollout_id` are one, every other sample is one by itself."""
    number: dict[tuple[bool, int | None], int] = {}
    return np.array(
        [
            number.setdefault((True, s.index) if s.rollout_id is None else (False, s.rollout_id), len(number))
            for s in samples
        ],
        dtype=np.int64,
    )
