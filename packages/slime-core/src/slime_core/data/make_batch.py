"""From finished groups to a `TrainBatch`: credited rewards, optimizer steps, and each token's share of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slime_core.data.conversion import Converted
from slime_core.errors import SampleError
from slime_core.protocols import ReductionView
from slime_core.samples import Columns, Group, Sample, TrainBatch, columns
from slime_core.samples.reused_memory import ReusedMemory


def make_batch(
    step: int,
    groups: Sequence[Group],
    *,
    global_batch_size: int,
    temperature: float,
    transform: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]],
    reducer: Callable[[ReductionView], NDArray[np.float64]],
    reward_key: str | None = None,
    reward_parts: Sequence[str] = (),
    shaping: Callable[[NDArray[np.int64]], NDArray[np.float64]] | None = None,
    memory: ReusedMemory | None = None,
    convert: Callable[[Sequence[Sample]], Converted] | None = None,
) -> TrainBatch:
    """Lay out a step's groups for the trainer.

    Args:
        step: number of the rollout-and-train cycle, from 1.
        groups: finished groups.
        global_batch_size: executions of an optimizer step; must divide the number of executions.
        temperature: rollout temperature.
        transform: reward transform, its options bound; one with a method `prepare` is shown the samples first, and may write to them.
        reducer: loss reducer, its options bound.
        reward_key: entry of a reward dict that is the score.
        reward_parts: entries of reward dicts that the estimator reads; each is transformed by itself.
        shaping: from the numbers of response tokens that were generated to what they add to the rewards, before `transform`.
        memory: of the arrays; new memory when not given.
        convert: a user's conversion of the samples; see `data.conversion`.

    Raises:
        SampleError: a sample cannot be trained on, or the executions do not fill the optimizer steps.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise SampleError(f"step {step}: the rollout returned no samples")
    converted = None if convert is None else convert(samples)
    if converted is not None:
        samples = converted.samples
    if callable(prepare := getattr(transform, "prepare", None)):
        prepare(samples)
    c = columns(samples, reward_key=reward_key, reward_parts=reward_parts, memory=memory)
    scored = c.raw_rewards.astype(np.float64)
    if shaping is not None:
        scored += shaping(np.array([sample.generated_length for sample in samples]))
    steps = optimizer_steps(c.rollout_ids, global_batch_size=global_batch_size)
    return TrainBatch(
        step=step,
        tokens=c.tokens,
        offsets=c.offsets,
        response_offsets=c.response_offsets,
        loss_mask=c.loss_mask,
        rollout_log_probs=c.rollout_log_probs,
        teacher_log_probs=c.teacher_log_probs,
        rewards=_credited(scored, c, transform)
        if converted is None or converted.rewards is None
        else converted.rewards,
        raw_rewards=c.raw_rewards,
        sample_ids=c.sample_ids,
        group_ids=c.group_ids,
        rollout_ids=c.rollout_ids,
        truncated=c.truncated,
        optimizer_steps=steps,
        weights=token_weights(
            steps,
            c.response_offsets,
            c.loss_mask,
            c.rollout_ids,
            reducer,
            total_lengths=np.diff(c.offsets),
            memory=memory,
        ),
        temperature=temperature,
        weight_versions=c.weight_versions,
        reward_parts={name: _credited(values, c, transform) for name, values in c.reward_parts.items()},
        extra=c.extra,
    )


def optimizer_steps(
    rollout_ids: NDArray[np.int64], *, global_batch_size: int
) -> tuple[NDArray[np.int64], ...]:
    """Cut samples into optimizer steps of `global_batch_size` executions; siblings stay together.

    Args:
        rollout_ids: [N] execution of each sample, numbered from 0 in order of appearance.
        global_batch_size: executions of a step.

    Returns:
        Positions of the samples of each step; every sample is in exactly one.

    Raises:
        SampleError: the executions do not fill the last step.
    """
    executions = int(rollout_ids.max()) + 1
    if executions % global_batch_size:
        raise SampleError(
            f"{executions} executions cannot be cut into optimizer steps of global_batch_size {global_batch_size}; "
            f"set --global-batch-size to a divisor of {executions}"
        )
    step_of = rollout_ids // global_batch_size
    order, n_steps = np.argsort(step_of, kind="stable"), executions // global_batch_size
    return tuple(np.split(order, np.searchsorted(step_of[order], np.arange(1, n_steps))))


def token_weights(
    steps: Sequence[NDArray[np.int64]],
    response_offsets: NDArray[np.int64],
    loss_mask: NDArray[np.float32],
    rollout_ids: NDArray[np.int64],
    reducer: Callable[[ReductionView], NDArray[np.float64]],
    *,
    total_lengths: NDArray[np.int64] | None = None,
    memory: ReusedMemory | None = None,
) -> NDArray[np.float32]:
    """Return the share of each response token in the loss of its optimizer step [T].

    Args:
        steps: positions of the samples of each optimizer step.
        response_offsets: [N + 1] sample i owns the entries response_offsets[i]:response_offsets[i + 1].
        loss_mask: [T] 1 where a token is trained on.
        rollout_ids: [N] execution of each sample.
        reducer: loss reducer, its options bound.
        total_lengths: [N] tokens of each sample, its prompt's included.
        memory: of the arrays; new memory when not given.
    """
    memory = memory or ReusedMemory()
    weights = memory.empty(len(loss_mask), np.float32)  # of which the steps cover every entry
    lengths = np.diff(response_offsets)
    for positions in steps:
        tokens = _tokens_of(positions, response_offsets)
        weights[tokens] = reducer(
            ReductionView(
                loss_mask=_float64(loss_mask[tokens], memory),
                response_lengths=lengths[positions],
                rollout_ids=rollout_ids[positions],
                total_lengths=None if total_lengths is None else total_lengths[positions],
            )
        )
    return weights


def _float64(values: NDArray[np.float32], memory: ReusedMemory) -> NDArray[np.float64]:
    array = memory.empty(len(values), np.float64)
    array[:] = values
    return array


def _tokens_of(
    positions: NDArray[np.int64], response_offsets: NDArray[np.int64]
) -> slice | NDArray[np.int64]:
    """Return where the response tokens of some samples are; a slice, which takes no memory, where they are in a row."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions) and (np.diff(positions) == 1).all():
        return slice(int(response_offsets[first]), int(response_offsets[last + 1]))
    return np.concatenate([np.arange(response_offsets[i], response_offsets[i + 1]) for i in positions])


def _credited(
    scored: NDArray[np.float64],
    c: Columns,
    transform: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]],
) -> NDArray[np.float32]:
    """Return rewards, or one part of them, after the transform."""
    rewards, sample_ids = np.asarray(transform(scored, c.group_ids), dtype=np.float64), c.sample_ids
    if rewards.shape != sample_ids.shape:
        raise SampleError(
            f"the reward transform returned shape {rewards.shape} for {len(sample_ids)} samples"
        )
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise SampleError(
            f"sample {sample_ids[bad[0]]}: the reward transform returned {rewards[bad[0]]}; wanted a finite number"
        )
    return rewards.astype(np.float32)
