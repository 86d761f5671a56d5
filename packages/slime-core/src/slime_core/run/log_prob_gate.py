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
#: The limit where none is chosen, nats: for arithmetic in 16 bits, with a wide margin.
LIMIT = 0.5
#: Where none is chosen and earlier steps agreed far better, a sample may differ by this much, nats, ...
CLOSE_LIMIT = 0.1
#: ... and no limit is lower than this multiple of what was found in earlier steps.
CLOSE_FACTOR = 100.0


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


class LogProbGate:
    """Stops a run whose engine and trainer do not agree, over all tokens that are compared or on one sample.

    Where no limit is chosen it is `LIMIT`; once a step has passed, each sample is held to `CLOSE_LIMIT` if those of all
    steps so far agreed 100 times better. So a run in float32, where 1e-6 is usual, is stopped by a fault that bfloat16
    would hide.

    Args:
        limit: largest mean difference of a step and of each sample, nats; None: as above.
        expects_jumps: whether samples may differ from one step on as they did not before, as with a KV cache that is kept
            through weight updates; `LIMIT` alone holds then.
    """

    def __init__(self, limit: float | None, *, expects_jumps: bool = False) -> None:
        self._limit, self._tightens = LIMIT if limit is None else limit, limit is None and not expects_jumps
        self.largest: float | None = None
        """Largest mean of a sample in the steps that passed, nats; None before the first. Part of a checkpoint."""

    def check(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Check the metrics of a step's training.

        Raises:
            TrainerError: engine and trainer do not agree; names the worst sample.
        """
        of_all = metrics.get(MEAN, 0.0)
        mean = (
            metrics.get(ON_POLICY, of_all) if math.isfinite(of_all) else of_all
        )  # nan of a stale token is a fault, too
        todo = "the engine's weights, its KV cache or numerics are not the trainer's (--logprob-diff-limit raises the limit)"
        worst = metrics.get(WORST, 0.0)
        sample = f"sample {metrics[WORST_SAMPLE]:.0f}" if WORST_SAMPLE in metrics else "no sample alone"
        if not mean <= self._limit:  # nan is no agreement
            raise TrainerError(
                f"step {step}: rollout and trainer log-probs differ by {mean:.4g} nats on average, most in {sample}; the limit "
                f"is {self._limit:g}; {todo}"
            )
        limit, why = self._limit_of_sample()
        if not worst <= limit:
            raise TrainerError(
                f"step {step}: rollout and trainer log-probs of sample {metrics[WORST_SAMPLE]:.0f} differ by "
                f"{worst:.4g} nats on average over its tokens, of the whole step by {mean:.4g}; the limit is {limit:g}{why}; {todo}"
            )
        if WORST in metrics:
            self.largest = max(worst, self.largest or 0.0)

    def _limit_of_sample(self) -> tuple[float, str]:
        """Return the limit of one sample, and why it is lower than that of the step, if it is."""
        close = max(CLOSE_LIMIT, CLOSE_FACTOR * (LIMIT if self.largest is None else self.largest))
        if not self._tightens or close >= self._limit:
            return self._limit, ""
        return close, f", as no sample of the steps before differed by more than {self.largest:.2g}"
