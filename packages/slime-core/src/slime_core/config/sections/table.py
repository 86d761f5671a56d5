"""The sections of core by the name of their table, rivals among their settings, and older spellings of flags."""

from __future__ import annotations

from slime_core.config.base import SectionModel
from slime_core.config.sections.generation import (
    DataSection,
    EnvironmentSection,
    EvalSection,
    RewardSection,
    RolloutSection,
)
from slime_core.config.sections.run import CheckpointSection, ClusterSection, ModelSection, RunSection
from slime_core.config.sections.training import AlgorithmSection, TrainSection

#: Sections of core, by table name.
CORE_SECTIONS: dict[str, type[SectionModel]] = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "rollout": RolloutSection,
    "environment": EnvironmentSection,
    "reward": RewardSection,
    "algorithm": AlgorithmSection,
    "train": TrainSection,
    "cluster": ClusterSection,
    "checkpoint": CheckpointSection,
    "eval": EvalSection,
}

#: Settings that choose one thing: of several the last one given, in recipes and then flags, is taken.
RIVALS = (
    ("reward", ("rm_type", "custom_rm_path", "rm_weights")),
    ("run", ("num_rollout", "num_epoch")),
)

#: Other spellings of flags, from the reference system's older guides.
ALIASES = {
    "prompt_key": "input_key",
    "reward_fn_path": "custom_rm_path",
    "rollout_generate_func_path": "custom_generate_function_path",
}
