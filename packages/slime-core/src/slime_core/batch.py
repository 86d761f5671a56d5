"""`TrainBatch`: what a trainer receives, as flat numpy columns with offsets.

Columnar, because a batch of 1,024 samples of 32k tokens is over a gigabyte as Python integers, and because
Ray ships numpy arrays without copying them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import SampleError
from slime_core.sample import Sample, Status


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
    reward_parts: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """[N] each, by name: the parts of rewards that the estimator reads, after the reward transform."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns, by name: an array [N, ...] or [T, ...], or a list of N objects."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rewards)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each sample, prompt included."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[N] response tokens of each sample."""
        return np.diff(self.response_offsets)


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
    reward_parts: dict[str, NDArray[np.float64]]
    extra: dict[str, Any]


def columns(
    samples: Sequence[Sample], *, reward_key: str | None = None, reward_parts: Sequence[str] = ()
) -> Columns:
    """Lay finished samples out as columns.

    Raises:
        SampleError: a sample is unfinished, breaks an invariant, has no finite reward or lacks a part of it, or
            lacks log-probs that others have, or has some that are not finite. Names the sample.
    """
    for sample in samples:
        _check_trainable(sample)
    lengths = [len(s.tokens) for s in samples]
    response_lengths = [s.response_length for s in samples]
    response_offsets = _offsets(response_lengths)
    raw = np.array([s.reward_value(reward_key) for s in samples], dtype=np.float32)
    for sample, value in zip(samples, raw, strict=True):
        if not np.isfinite(value):
            raise SampleError(f"{sample.name}: reward is {value}; a reward must be finite")
    mask = np.ones(response_offsets[-1], dtype=np.float32)
    for i, sample in enumerate(samples):
        span = slice(response_offsets[i], response_offsets[i + 1])
        if sample.remove_sample:
            mask[span] = 0.0
        elif sample.loss_mask is not None:
            mask[span] = sample.loss_mask
    return Columns(
        tokens=np.concatenate([np.asarray(s.tokens, dtype=np.int32) for s in samples]),
        offsets=_offsets(lengths),
        response_offsets=response_offsets,
        loss_mask=mask,
        rollout_log_probs=_per_token(samples, "rollout_log_probs"),
        teacher_log_probs=_per_token(samples, "teacher_log_probs"),
        raw_rewards=raw,
        sample_ids=np.array([s.index for s in samples], dtype=np.int64),
        group_ids=np.array([s.group_index for s in samples], dtype=np.int64),
        rollout_ids=_execution_ids(samples),
        truncated=np.array([s.status is Status.TRUNCATED for s in samples], dtype=np.bool_),
        reward_parts={name: np.array([s.reward_part(name) for s in samples]) for name in reward_parts},
        extra=_extra(samples),
    )


def _extra(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the further columns that some sample has something for.

    `train_metadata` and `rollout_routed_experts`: as the samples hold them. `weight_version`: of the weights that
    generated each, the newest. `rollout_top_p_tokens`: (ids, offsets) of each; see `Sample.rollout_top_p_token_ids`.
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
        "weight_version": [s.weight_versions[-1] if s.weight_versions else None for s in samples],
    }
    return {name: column for name, column in extra.items() if any(value is not None for value in column)}


def _check_trainable(sample: Sample) -> None:
    sample.check()
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


def _per_token(samples: Sequence[Sample], name: str) -> NDArray[np.float32] | None:
    having = [getattr(s, name) is not None for s in samples]
    if not any(having):
        return None
    if not all(having):
        lacking = samples[having.index(False)]
        raise SampleError(f"{lacking.name}: has no {name}, other samples of the batch have")
    columns = [np.asarray(getattr(s, name), dtype=np.float32) for s in samples]
    for sample, column in zip(samples, columns, strict=True):
        if (bad := np.flatnonzero(~np.isfinite(column))).size:
            raise SampleError(
                f"{sample.name}: {name} of response token {bad[0]} is {column[bad[0]]}; wanted a finite number"
            )
    return np.concatenate(columns)


def _execution_ids(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Number executions: those with a `rollout_id` by it, all others each for itself."""
    keys = [("s", s.index) if s.rollout_id is None else ("r", s.rollout_id) for s in samples]
    number: dict[tuple[str, int | None], int] = {}
    return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)
