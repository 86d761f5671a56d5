"""`LearnerSettings`: what each rank of the trainer is built from. Imports neither torch nor megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.assemble import Algorithm
from slime_core.config.sections import TrainSection

from slime_megatron.section import MegatronSection

if TYPE_CHECKING:
    from slime_models.family import ModelFamily


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """What a learner is built from; picklable if the functions of `algorithm` are."""

    model_path: Path
    """Hugging Face folder of the initial weights."""
    family: ModelFamily
    """Of that folder's model_type."""
    train: TrainSection
    """Core's settings of training."""
    megatron: MegatronSection
    """Ours."""
    seed: int
    """Of everything random."""
    total_steps: int | None = None
    """Optimizer steps of the run; needed by a learning rate that decays without `lr_decay_iters`."""
    algorithm: Algorithm
    """Estimator and loss."""
