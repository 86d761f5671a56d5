"""Checks that a run trained at all: one whose every optimizer step was skipped is not complete."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.errors import TrainerError
from slime_core.samples import TrainBatch


class Learnt:
    """Counts the optimizer steps that a process took, by the trainer's `train/skipped_steps`."""

    def __init__(self) -> None:
        self._n_steps = self._n_skipped = 0

    def add(self, batch: TrainBatch, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Count a batch.

        Args:
            batch: that was trained on.
            metrics: the trainer's of it.
            is_last: whether it is the run's last.

        Raises:
            TrainerError: it is the last, and all optimizer steps of this process were skipped.
        """
        self._n_steps += len(batch.optimizer_steps)
        self._n_skipped += int(metrics.get("train/skipped_steps", 0))
        if is_last and self._n_skipped >= self._n_steps > 0:
            raise TrainerError(
                f"step {batch.step}: the last step, and all {self._n_steps} optimizer steps since the start were skipped, as "
                "their gradients were not finite: nothing was learnt; lower the learning rate, look for bad samples, or "
                "with --fp16 lower --initial-loss-scale, or raise --num-rollout"
            )
