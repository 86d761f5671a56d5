"""Contract kits: one call in a test tells whether a plugin keeps the promises of its kind; `ContractError` says which it breaks.

A kit checks what the protocols say, and nothing that they leave open. What needs torch is elsewhere: estimators and losses in
`slime_algos.testing`, model families and weight transports in `slime_models.testing`. Entry points of `slime.kits` are what
`slime plugins check` runs.
"""

from slime_core.testing.contracts.components import check_buffer, check_source, check_tokenizer
from slime_core.testing.contracts.engines import check_engine
from slime_core.testing.contracts.environments import check_environment
from slime_core.testing.contracts.installed import check_plugin, plugins_of
from slime_core.testing.contracts.kit import Kit
from slime_core.testing.contracts.runs import (
    check_generator,
    check_launcher,
    check_loop,
    check_rollout,
    check_tracker,
)
from slime_core.testing.contracts.scores import (
    check_filter,
    check_group_reward,
    check_reducer,
    check_reward,
    check_reward_transform,
)
from slime_core.testing.contracts.trainers import check_trainer

__all__ = [
    "Kit",
    "check_buffer",
    "check_engine",
    "check_environment",
    "check_filter",
    "check_generator",
    "check_group_reward",
    "check_launcher",
    "check_loop",
    "check_plugin",
    "check_reducer",
    "check_reward",
    "check_reward_transform",
    "check_rollout",
    "check_source",
    "check_tokenizer",
    "check_tracker",
    "check_trainer",
    "plugins_of",
]
