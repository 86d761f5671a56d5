"""A step of the trainer on its way: packed into micro-batches, begun, and credited."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from slime_core.protocols import Columns, Metrics
from slime_core.samples import TrainBatch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatches
from slime_megatron.batch.routing import engine_routes
from slime_megatron.batch.sampling_mask import SamplingMask
from slime_megatron.batch.step_batches import pack_steps
from slime_megatron.batch.token_columns import TokenColumns
from slime_megatron.model.family_layers import layers_of
from slime_megatron.parallel.process_groups import World
from slime_megatron.settings.learner_settings import LearnerSettings


@dataclass(frozen=True)
class BegunStep:
    """A step whose log-probs are known."""

    batch: TrainBatch
    steps: list[MicroBatches]
    """This data-parallel rank's micro-batches of each optimizer step."""
    columns: TokenColumns
    """With all that the policy's ranks compute before tokens are credited."""
    log_probs: Tensor | None
    """float32 [T]: the policy's, which are compared with the engine's; None where the first optimizer step tells them."""
    critic_only: bool
    """Whether the policy takes no optimizer steps."""
    seconds: float
    """From the begin of the step until it was there."""


@dataclass(frozen=True)
class CreditedStep:
    """A step whose advantages are known."""

    begun: BegunStep
    columns: TokenColumns
    """Those that losses see."""
    advantages: Tensor
    """float32 [T]."""
    returns: Tensor
    """float32 [T]: what a critic's values are to become."""
    metrics: Metrics
    """Of the estimator."""
    waited_s: float
    """Seconds between its begin and its credit, in which this rank did nothing."""

    def for_the_critic(self) -> Columns:
        """Return what a critic that is elsewhere learns from: `returns`, `loss_mask`, `weights`, and `importance` where it is given."""
        columns = self.columns
        found = {"returns": self.returns, "loss_mask": columns.loss_mask, "weights": columns.weights}
        if columns.importance is not None:
            found["importance"] = columns.importance
        return {name: column.numpy(force=True).astype(np.float32) for name, column in found.items()}


def pack(
    batch: TrainBatch,
    settings: LearnerSettings,
    architecture: Architecture,
    world: World,
    *,
    needs: Collection[str],
    sampling_mask: SamplingMask | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MicroBatches]:
    """Return the micro-batches of this data-parallel rank, for each optimizer step; see `pack_steps`."""
    layers, replays = layers_of(settings.family, architecture), settings.megatron.use_rollout_routing_replay
    return pack_steps(
        batch,
        architecture,
        settings.megatron,
        world,
        max_tokens_per_gpu=settings.train.max_tokens_per_gpu,
        needs=needs,
        routes=engine_routes(batch, architecture) if replays else None,
        sampling_mask=sampling_mask,
        dtype=dtype,
        device=device,
        rotary=layers.rotary_tables,
        flops=layers.forward_flops,
    )
