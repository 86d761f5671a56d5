"""`FrozenLearner`: one rank of reference and teacher in processes of their own. Everything here is synchronous and runs on one thread."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import torch
from slime_core.errors import CheckpointError
from slime_core.protocols import Columns, Metrics
from slime_core.runtime.phase_times import PhaseTimes
from slime_core.samples import TrainBatch

from slime_megatron.batch.sampling_mask import sampling_mask_of
from slime_megatron.importing import quiet
from slime_megatron.learner.architecture import padded_architecture, placement
from slime_megatron.learner.policy_model import build_frozen
from slime_megatron.learner.step import pack
from slime_megatron.model.gpt import response_log_probs
from slime_megatron.optim.passes import Passes
from slime_megatron.parallel import process_groups
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.manifest import read_description


class FrozenLearner:
    """The reference and the teacher without the policy: the role `ref`. Methods are collective over its ranks.

    Each is a model of its own on the device, its weights alone: no gradients and no optimizer, and nothing that a checkpoint would have
    to hold. It sees the same whole batches as the policy's ranks and packs them as these do, and so computes the log-probs that
    they would: the same numbers, if there are as many data-parallel ranks.

    Raises:
        CheckpointError: a folder's weights are of another architecture than the policy's.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._architecture = padded_architecture(settings)
        self.times = PhaseTimes(settings.rank.number)
        """What the last step did and when, on this rank."""
        self._on = placement(settings)
        self._world = process_groups.World(settings.megatron, seed=settings.seed, rank=settings.rank)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
            if settings.hooks.init is not None:
                settings.hooks.init(settings)
            output = partial(response_log_probs, chunk_tokens=settings.megatron.log_probs_chunk_size)
            self._models = {
                role: build_frozen(settings, self._architecture, role, **self._on) for role in settings.frozen
            }
            self._passes = {
                role: Passes(model, self._world, times=self.times, output_processor=output)
                for role, model in self._models.items()
            }
            on_failure.pop_all()

    def begin(self, batch: TrainBatch) -> Columns:
        """Return the batch's `ref_log_probs` and `teacher_log_probs`, those that are read; see `PooledTrainer`."""
        self.times.restart()
        restricted = sampling_mask_of(batch) if self._settings.restricted else None
        steps = pack(
            batch,
            self._settings,
            self._architecture,
            self._world,
            needs=(),
            sampling_mask=restricted,
            **self._on,
        )
        like = torch.empty(len(batch.loss_mask), device=self._on["device"])
        found = {}
        for role, passes in self._passes.items():
            if self._settings.hooks.before_log_prob is not None:
                self._settings.hooks.before_log_prob(self._models[role], role)
            name = f"{role}_log_probs"
            with self.times.timed(name):
                found[name] = passes.forward(steps, like, lambda output: output.numbers[0]).numpy(force=True)
        return found

    def learn(self, columns: Columns) -> Metrics:
        """Return how long the log-probs of the step took; see `PooledTrainer`."""
        names = [f"{role}_log_probs" for role in self._models]
        return {f"perf/{name}_time": self.times.total_s(name) for name in names}

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Do nothing: the models are what their folders are."""

    def written(self, wait: bool) -> bool:
        """Return that nothing is being written."""
        return True

    def load(self, folder: Path) -> None:
        """Check that a checkpoint's run had the reference that is here.

        Raises:
            CheckpointError: that run had changed its reference.
        """
        if "ref" in self._models and "ref" in read_description(folder).get("roles", ()):
            raise CheckpointError(
                f"{folder}: found a reference that --ref-update-interval has changed; wanted a frozen one for ranks of its "
                "own; leave --ref-num-nodes and --ref-num-gpus-per-node out"
            )

    def offload(self) -> None:
        """Do nothing: weights stay where they are, as those of the policy do."""

    def onload(self) -> None:
        """Do nothing, as `offload` did."""

    def close(self) -> None:
        """End the process groups."""
        self._world.close()
