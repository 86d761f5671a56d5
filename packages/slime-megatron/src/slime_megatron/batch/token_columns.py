"""The columns of a `TrainBatch` as tensors on the model's device, and the views of them that losses see."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.data.make_batch import token_weights
from slime_core.errors import TrainerError
from slime_core.protocols import TokenView
from slime_core.protocols.correction import Correction
from slime_core.run.assemble import Algorithm
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatch


@dataclass(frozen=True)
class TokenColumns:
    """The columns of a batch: float32 [T], an entry for each response token.

    `rewards`, each of `reward_parts`, and `train_metadata` have an entry for each of the N samples.
    """

    loss_mask: Tensor
    weights: Tensor
    rewards: Tensor
    reward_parts: Mapping[str, Tensor]
    rollout_log_probs: Tensor | None
    teacher_log_probs: Tensor | None
    train_metadata: Sequence[Any] | None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None
    importance: Tensor | None = None
    staleness: Tensor | None = None
    """int64 [T]."""
    total_lengths: Tensor | None = None
    """int64 [N]."""

    @classmethod
    def of(cls, batch: TrainBatch, device: torch.device, *, needs: Collection[str] = ()) -> TokenColumns:
        """Return the columns of a batch, without those that the trainer computes.

        Args:
            batch: the samples.
            device: of the columns.
            needs: optional fields of `TokenView` that estimator and loss read.

        Raises:
            SampleError: they read the staleness of tokens, and the weights that generated one are not known.
        """

        def column(values: NDArray[np.float32]) -> Tensor:
            return upload(np.asarray(values, dtype=np.float32), device)

        rollout, teacher = batch.rollout_log_probs, batch.teacher_log_probs
        return cls(
            loss_mask=column(batch.loss_mask),
            weights=column(batch.weights),
            rewards=column(batch.rewards),
            reward_parts={name: column(values) for name, values in batch.reward_parts.items()},
            rollout_log_probs=None if rollout is None else column(rollout),
            teacher_log_probs=None if teacher is None else column(teacher),
            train_metadata=batch.extra.get("train_metadata"),
            staleness=upload(batch.staleness, device) if "staleness" in needs else None,
            total_lengths=upload(batch.lengths, device) if "total_lengths" in needs else None,
        )

    def whole(self, batch: TrainBatch) -> TokenView:
        """Return the view of all samples, in the batch's order, for an estimator."""
        device = self.weights.device
        return TokenView(
            offsets=upload(batch.response_offsets, device),
            sample_of_token=upload(np.repeat(np.arange(len(batch)), batch.response_lengths), device),
            loss_mask=self.loss_mask,
            weights=self.weights,
            rewards=self.rewards,
            old_log_probs=self.old_log_probs,
            rollout_log_probs=self.rollout_log_probs,
            ref_log_probs=self.ref_log_probs,
            teacher_log_probs=self.teacher_log_probs,
            sum_pi_squared=self.sum_pi_squared,
            values=self.values,
            reward_parts=self.reward_parts,
            group_ids=upload(batch.group_ids, device),
            train_metadata=self.train_metadata,
            staleness=self.staleness,
            total_lengths=self.total_lengths,
        )

    def corrected(self, batch: TrainBatch, correction: Correction, algorithm: Algorithm) -> TokenColumns:
        """Return the columns that losses see: rejected tokens are not trained on, and importance weights are there.

        Args:
            batch: the samples.
            correction: what the estimator said of their tokens.
            algorithm: its loss is to apply importance weights; its reducer weighs the tokens that are left.

        Raises:
            PluginError: it does not.
            TrainerError: there is no reducer, and rejected tokens do not count.
        """
        correction.check_loss(algorithm.loss)
        columns = replace(self, importance=correction.importance)
        if correction.kept is None:
            return columns
        mask = self.loss_mask * correction.kept
        if correction.count_rejected:
            return replace(columns, loss_mask=mask, weights=self.weights * correction.kept)
        if algorithm.reducer is None:
            raise TrainerError(
                "estimator: rejected tokens do not count, and the trainer has no reducer; wanted `Algorithm.reducer`"
            )
        steps, offsets = batch.optimizer_steps, batch.response_offsets
        weights = token_weights(
            steps,
            offsets,
            mask.cpu().numpy(),
            batch.rollout_ids,
            algorithm.reducer,
            total_lengths=batch.lengths,
        )
        return replace(columns, loss_mask=mask, weights=upload(weights, mask.device))

    def view(
        self,
        micro: MicroBatch,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> TokenView:
        """Return the view of a micro-batch; the detached new log-probs take the place of old ones where there are none."""
        wanted, temperature = micro.responses.logits, micro.responses.temperature
        old, given = self.old_log_probs, self.train_metadata

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[micro.columns]

        return TokenView(
            offsets=micro.offsets,
            sample_of_token=micro.sample_of_token,
            loss_mask=self.loss_mask[micro.columns] * micro.counted,
            weights=self.weights[micro.columns] * micro.counted,
            rewards=self.rewards[micro.samples],
            old_log_probs=log_probs.detach() if old is None and log_probs is not None else pick(old),
            log_probs=log_probs,
            entropy=entropy,
            rollout_log_probs=pick(self.rollout_log_probs),
            ref_log_probs=pick(self.ref_log_probs),
            teacher_log_probs=pick(self.teacher_log_probs),
            values=pick(self.values),
            importance=pick(self.importance),
            staleness=pick(self.staleness),
            train_metadata=given and [given[i] for i in micro.members],
            total_lengths=None if self.total_lengths is None else self.total_lengths[micro.samples],
            **({} if wanted is None else wanted.fields(logits, temperature)),
        )
