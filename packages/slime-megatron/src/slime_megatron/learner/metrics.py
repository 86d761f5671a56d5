"""Metrics of a step besides its loss: work and time, means of columns, and the difference of the engine's log-probs from ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.protocols import Metrics
from slime_core.run.log_prob_gate import MEAN, agreement
from slime_core.runtime.phase_times import PhaseTimes
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatches
from slime_megatron.batch.token_columns import TokenColumns
from slime_megatron.parallel.process_groups import World


def work(batch: TrainBatch, steps: Sequence[MicroBatches], times: PhaseTimes, world: World) -> Metrics:
    """Return what the ranks did, and how long this one took. Collective over the world.

    Args:
        batch: the samples.
        steps: this rank's micro-batches.
        times: of this rank's call of `train`, which ends now.
        world: the ranks.
    """
    own = [micro for step in steps for micro in step]
    context = world.token_split.context
    n_ranks = (
        1 if context is None else context.size()
    )  # which have a part of each row, and of which one reports
    shares = {
        "tokens": float(n_ranks * sum(micro.packed.n_tokens for micro in own)),
        "slots": float(n_ranks * sum(micro.packed.n_slots for micro in own)),
        "flops": float(sum(micro.flops for micro in own)),
    }
    found, log_probs_s = world.sum_over_ranks(shares), times.total_s("log_probs")
    parts = {name: times.total_s(name) for name in ("ref_log_probs", "teacher_log_probs", "ref_model_update")}
    return {
        "perf/train_tokens": float(len(batch.tokens)),
        "perf/actor_train_time": times.elapsed_s() - log_probs_s,
        "perf/log_probs_time": log_probs_s,
        **{f"perf/{name}_time": seconds for name, seconds in parts.items() if seconds},
        "perf/forwarded_tokens": found["tokens"],
        "perf/forward_tflop": found["flops"] / 1e12,
        "perf/padding_frac": 1 - found["tokens"] / found["slots"],
    }


def sample_means(
    batch: TrainBatch, columns: TokenColumns, log_probs: Tensor | None, credited: Mapping[str, Tensor]
) -> Metrics:
    """Return `train/mean/*`: of each column the mean over trained tokens of a sample, then over the samples of the step.

    Args:
        batch: the samples.
        columns: theirs, as losses see them.
        log_probs: [T], the policy's when the step began; None where nobody computed them.
        credited: name -> [T], what the estimator made of rewards.
    """
    trained, of_tokens = _of_steps(batch, batch.optimizer_steps)
    device = columns.loss_mask.device
    mask = columns.loss_mask * upload(of_tokens, device)
    sample = upload(np.repeat(np.arange(len(batch)), batch.response_lengths), device)
    counts = mask.new_zeros(len(batch)).index_add_(0, sample, mask)
    weights = mask / counts.clamp(min=1)[sample] / max(1, int(trained.sum()))
    given = {
        "log_probs": log_probs,
        "ref_log_probs": columns.ref_log_probs,
        "teacher_log_probs": columns.teacher_log_probs,
        "values": columns.values,
        **credited,
    }
    known = {name: column for name, column in given.items() if column is not None}
    sums = [(column.nan_to_num() * weights).sum() for column in known.values()]
    rewards = columns.rewards[upload(trained, device)].mean()
    read = torch.stack([*sums, rewards]).tolist()  # waits for the device once
    return {f"train/mean/{name}": value for name, value in zip([*known, "rewards"], read, strict=True)}


def mismatch(
    batch: TrainBatch,
    columns: TokenColumns,
    log_probs: Tensor | None,
    steps: Sequence[NDArray[np.int64]],
    *,
    by_own_weights: bool,
) -> Metrics:
    """Return the mean difference between the engine's log-probs and ours, over trainable tokens; nan where one of them is.

    And what the gate reads besides, see `slime_core.run.log_prob_gate`.

    Args:
        batch: the samples.
        columns: theirs.
        log_probs: ours [T], computed for the samples of `steps`.
        steps: optimizer steps of the batch.
        by_own_weights: whether ours are those of the weights that generated each token.
    """
    if columns.rollout_log_probs is None or log_probs is None:
        return {}
    _, of_tokens = _of_steps(batch, steps)
    trained = (columns.loss_mask > 0) & torch.from_numpy(of_tokens).to(log_probs.device)
    apart = (log_probs - columns.rollout_log_probs).abs()
    difference = apart[trained]
    found = {MEAN: float(difference.sum() / max(1, len(difference)))}
    counted = trained.cpu().numpy()
    return found | agreement(batch, apart.cpu().numpy(), counted, by_own_weights=by_own_weights)


def _of_steps(
    batch: TrainBatch, steps: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which samples are in optimizer steps, and which response tokens are."""
    samples = np.isin(np.arange(len(batch)), np.concatenate(steps))
    return samples, np.repeat(samples, batch.response_lengths)
