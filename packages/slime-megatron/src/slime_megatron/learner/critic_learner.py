"""`CriticLearner`: one rank of a critic that is in processes of its own. Everything here is synchronous and runs on one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.errors import TrainerError
from slime_core.protocols import Columns, Metrics
from slime_core.runtime.phase_times import PhaseTimes
from slime_core.samples import TrainBatch
from slime_models.upload import upload

from slime_megatron.batch.micro_batch import MicroBatches
from slime_megatron.batch.token_columns import TokenColumns
from slime_megatron.checkpoint import state
from slime_megatron.checkpoint.writer import CheckpointWriter
from slime_megatron.importing import quiet
from slime_megatron.learner.architecture import padded_architecture, placement
from slime_megatron.learner.critic import CRITIC, Critic
from slime_megatron.learner.step import pack
from slime_megatron.parallel import process_groups
from slime_megatron.settings.learner_settings import LearnerSettings


class CriticLearner:
    """The critic without the policy. Methods are collective over the ranks of the critic.

    It sees the same whole batches as the policy's ranks, packs them as these do, and so computes what a critic among them
    would: the same numbers, if there are as many data-parallel ranks.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._architecture = padded_architecture(settings)
        self.times = PhaseTimes(settings.rank.number)
        """What the last step did and when, on this rank."""
        self._on = placement(settings)
        self._step: tuple[Sequence[MicroBatches], TokenColumns] | None = None  # between calls
        self._world = process_groups.World(settings.megatron, seed=settings.seed, rank=settings.rank)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
            self._checkpoint_writer = CheckpointWriter(self._world)
            if settings.hooks.init is not None:
                settings.hooks.init(settings)
            self._critic = Critic(settings, self._architecture, self._world, times=self.times, **self._on)
            on_failure.pop_all()

    def begin(self, batch: TrainBatch) -> Columns:
        """Return the batch's `values`; see `PooledTrainer`."""
        self.times.restart()
        steps = pack(
            batch, self._settings, self._architecture, self._world, needs=(), sampling_mask=None, **self._on
        )
        columns = TokenColumns.of(batch, self._on["device"], needs=self._settings.algorithm.needs)
        with self.times.timed("values"):
            values = self._critic.values(steps, columns.weights)
        self._step = steps, replace(columns, values=values)
        return {"values": values.numpy(force=True)}

    def learn(self, columns: Columns) -> Metrics:
        """Run the critic's optimizer steps; see `PooledTrainer`.

        Args:
            columns: what `CreditedStep.for_the_critic` returned.
        """
        if self._step is None:
            raise TrainerError("learn: no step has begun; call begin() first")
        (steps, own), self._step = self._step, None
        returns = upload(columns["returns"], self._on["device"])
        learned = own.having({name: column for name, column in columns.items() if name != "returns"})
        with self.times.timed("critic"):
            return self._critic.train(steps, learned, returns)

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write all state where a critic among the policy's ranks is written: into a folder below; see `CheckpointWriter.save`."""
        self._checkpoint_writer.save([(self._critic.state, folder / CRITIC)], in_background=in_background)

    def written(self, wait: bool) -> bool:
        """Return whether the folder of a save in the background is complete; see `CheckpointWriter.complete`."""
        return self._checkpoint_writer.complete(wait=wait)

    def load(self, folder: Path) -> None:
        """Restore all state, from wherever the critic was; see `state.load`."""
        self.written(wait=True)
        state.load(self._critic.state, folder / CRITIC)

    def offload(self) -> None:
        """Move the optimizer's state to the host and free the gradients. Nothing to do on a CPU."""
        self._critic.trained.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self._critic.trained.onload()

    def close(self) -> None:
        """End the process groups, when nothing is written any more."""
        self._checkpoint_writer.close()
        self._world.close()
