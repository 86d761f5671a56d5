"""The protocols between engine, trainer, reward, data source and loop.

Core never imports torch, so tensors appear here as `Any`; each docstring gives their shapes and dtypes. Every
method that may cross a process is `async`, so that a remote handle satisfies the same protocol.
Shape letters: G samples of a group, N samples of a batch, T response tokens of a batch, flat over samples.
"""

from slime_core.protocols.algorithm import (
    AdvantageEstimator,
    LossFn,
    Needs,
    Reducer,
    ReductionView,
    TokenView,
    needs_of,
)
from slime_core.protocols.capabilities import EngineCapabilities, TrainerCapabilities
from slime_core.protocols.data import Buffer, DataSource
from slime_core.protocols.engine import (
    IMAGE,
    TOP_P_TOKENS,
    AsksForWeights,
    Completion,
    EngineLoad,
    Generates,
    ReportsLoad,
    RolloutEngine,
    SamplingParams,
)
from slime_core.protocols.environment import MULTI_TURN, Environment, Observation
from slime_core.protocols.placement import EngineGpus, GpuRange, Place, Site
from slime_core.protocols.pools import Columns, PooledTrainer, Role
from slime_core.protocols.rewards import GroupRewardFn, RewardFn, RewardTransform
from slime_core.protocols.rollout import EvalFn, GenerateContext, GenerateFn, GroupFilter, WeakReason
from slime_core.protocols.tokenizer import Tokenizer, end_ids
from slime_core.protocols.trainer import Metrics, OffloadsWeights, SendsByStage, Trainer
from slime_core.protocols.transfer import Fingerprint, Senders, TransferPlan

__all__ = [
    "IMAGE",
    "MULTI_TURN",
    "TOP_P_TOKENS",
    "AdvantageEstimator",
    "AsksForWeights",
    "Buffer",
    "Columns",
    "Completion",
    "DataSource",
    "EngineCapabilities",
    "EngineGpus",
    "EngineLoad",
    "Environment",
    "EvalFn",
    "Fingerprint",
    "GenerateContext",
    "GenerateFn",
    "Generates",
    "GpuRange",
    "GroupFilter",
    "GroupRewardFn",
    "LossFn",
    "Metrics",
    "Needs",
    "Observation",
    "OffloadsWeights",
    "Place",
    "PooledTrainer",
    "Reducer",
    "ReductionView",
    "ReportsLoad",
    "RewardFn",
    "RewardTransform",
    "Role",
    "RolloutEngine",
    "SamplingParams",
    "Senders",
    "SendsByStage",
    "Site",
    "TokenView",
    "Tokenizer",
    "Trainer",
    "TrainerCapabilities",
    "TransferPlan",
    "WeakReason",
    "end_ids",
    "needs_of",
]
