"""The protocol `PooledTrainer`: one role of a trainer whose roles have processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from slime_core.protocols.trainer import Metrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.samples import TrainBatch

#: What a trainer's process may hold: the policy, with all that has no processes of its own; the critic alone; or the frozen models
#: alone, which are the reference and a teacher.
Role = Literal["policy", "critic", "ref"]
#: Columns of a batch, by name: float32 [T], an entry for each response token.
type Columns = Mapping[str, NDArray[np.float32]]


class PooledTrainer(Protocol):
    """What a rank of a trainer offers beside `Trainer`, so that a launcher can have its other roles in pools of their own.

    `Rank.role` says what the rank holds. Each role's ranks are a world of their own, and get the same whole batch. What
    `Trainer.train` does is three calls then: `begin` of all roles at the same time, `credit` of the policy's ranks, `learn` of all
    roles at the same time. Of several ranks of a role the first speaks for all.

    All roles are given the same folder to save into and to load from, one role after the other; what each writes there is what
    the trainer would have written without pools, so that a run may be resumed with and without. Weights are sent by the policy's
    ranks alone.
    """

    async def begin(self, batch: TrainBatch) -> Columns:
        """Take a batch, and return what this role computes of it for the policy, which returns nothing.

        A critic its `values`, the role `ref` the `ref_log_probs` and `teacher_log_probs` that are read.
        """

    async def credit(self, columns: Columns) -> Columns:
        """Credit the batch's tokens, by the columns of the other roles; return what the critic learns from.

        Of the policy's ranks alone. That is `returns`, and what the estimator has made of `loss_mask` and `weights`.
        """

    async def learn(self, columns: Columns) -> Metrics:
        """Run the batch's optimizer steps of this role, which may have none; return its metrics.

        Args:
            columns: what `credit` returned.
        """
