"""The sections that core itself reads, an idea a module."""

from slime_core.config.sections.generation import (
    DataSection,
    EnvironmentSection,
    EvalSection,
    RewardSection,
    RolloutSection,
)
from slime_core.config.sections.run import CheckpointSection, ClusterSection, ModelSection, RunSection
from slime_core.config.sections.table import ALIASES, CORE_SECTIONS, RIVALS
from slime_core.config.sections.training import AlgorithmSection, TrainSection

__all__ = [
    "ALIASES",
    "CORE_SECTIONS",
    "RIVALS",
    "AlgorithmSection",
    "CheckpointSection",
    "ClusterSection",
    "DataSection",
    "EnvironmentSection",
    "EvalSection",
    "ModelSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "TrainSection",
]
