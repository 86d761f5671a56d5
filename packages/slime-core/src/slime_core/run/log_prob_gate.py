"""The gate on log-probs: engine and trainer must agree on the tokens that the trained weights generated, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import TrainerError
from slime_core.protocols import Metrics
from slime_core.samples import TrainBatch
from slime_core.samples.versions import UNKNOWN_VERSION

#: Mean difference over all trained tokens, nats: what every trainer reports that compares.
MEAN = "train/train_rollout_logprob_abs_diff"
#: The same over tokens that are not stale, where others are.
ON_POLICY = f"{MEAN}/on_policy"
#: The largest mean of a sample's tokens that are not stale, and the sample's index.
WORST, WORST_SAMPLE = f"{MEAN}/worst_sample", f"{MEAN}/worst_sample_index"
#: Fewer tokens, of a sample or of a step, count as if they were so many: one token says little, above all in 16 bits.
FEWEST_TOKENS = 8


def agreement(
    batch: TrainBatch, differences: NDArray[Any], counted: NDArray[np.bool_], *, by_own_weights: bool
) -> Metrics:
    """Return the metrics that the gate reads besides the mean over all tokens.

    The log-probs of stale tokens differ as far as the policy has moved, which is no fault: they are left out unless each
    token was judged by the weights that generated it.

    Args:
        batch: the samples.
        differences: [T] absolute differences between the engine's log-probs and the trainer's, nats; nan where one is.
        counted: [T] which tokens were compared.
        by_own_weights: whether the trainer's log-probs are those of the weights that generated each token.
    """
    of_sample = np.repeat(np.arange(len(batch)), batch.response_lengths)
    versions = np.full(len(counted), UNKNOWN_VERSION)
    if batch.weight_versions is not None:
        versions = batch.weight_versions.by_token()
    is_alike = by_own_weights | (versions == UNKNOWN_VERSION) | (versions >= batch.step - 1)
    alike = counted & is_alike
    if not alike.any():
        return {}
    found = np.where(np.isfinite(differences[alike]), differences[alike], np.inf).astype(np.float64)
    sums = np.bincount(of_sample[alike], weights=found, minlength=len(batch))
    counts = np.bincount(of_sample[alike], minlength=len(batch))
    means = sums / np.maximum(counts, FEWEST_TOKENS)
    worst = int(means.argmax())
    metrics = {WORST: float(means[worst]), WORST_SAMPLE: float(batch.sample_ids[worst])}
    return (
        metrics
        if alike.sum() == counted.sum()
        else metrics | {ON_POLICY: float(found.sum() / max(len(found), FEWEST_TOKENS))}
    )


def check_agreement(metrics: Mapping[str, float], *, step: int, limit: float) -> None:
    """Check that engine and trainer agree, over all tokens that are compared and on every sample.

    Raises:
        TrainerError: they do not; names the worst sample.
    """
    of_all = metrics.get(MEAN, 0.0)
    mean = (
        metrics.get(ON_POLICY, of_all) if math.isfinite(of_all) else of_all
    )  # nan of a stale token is a fault, too
    todo = "the engine's weights, its KV cache or numerics are not the trainer's (--logprob-diff-limit raises the limit)"
    worst = metrics.get(WORST, 0.0)
    sample = f"sample {metrics[WORST_SAMPLE]:.0f}" if WORST_SAMPLE in metrics else "no sample alone"
    if not mean <= limit:  # nan is no agreement
        raise TrainerError(
            f"step {step}: rollout and trainer log-probs differ by {mean:.4g} nats on average, most in {sample}; the limit "
            f"is {limit:g}; {todo}"
        )
    if not worst <= limit:
        raise TrainerError(
            f"step {step}: rollout and trainer log-probs of sample {metrics[WORST_SAMPLE]:.0f} differ by {worst:.4g} nats on "
            f"average over its tokens, of the whole step by {mean:.4g}; the limit is {limit:g}; {todo}"
        )
