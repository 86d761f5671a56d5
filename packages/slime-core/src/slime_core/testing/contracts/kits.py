"""The kits of core's groups, as `slime plugins check` runs them: entry points of `slime.kits`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.plugins.registry import Registry
from slime_core.protocols import Buffer, DataSource, RolloutEngine, Trainer
from slime_core.run.build import make_build
from slime_core.testing.contracts.components import check_buffer, check_source
from slime_core.testing.contracts.engines import check_engine
from slime_core.testing.contracts.kit import Kit
from slime_core.testing.contracts.promises import group_of
from slime_core.testing.contracts.runs import (
    check_generator,
    check_loop,
    check_rollout,
    check_tracker,
    tabular_settings,
)
from slime_core.testing.contracts.scores import (
    check_filter,
    check_group_reward,
    check_reducer,
    check_reward,
    check_reward_transform,
)
from slime_core.testing.contracts.trainers import check_trainer

#: What is made for other things may say so by whatever error.
_ANY = (Exception, SystemExit)
#: Seconds that a run of two steps over a table may take.
_RUN_S = 60.0
#: `n_samples_per_prompt` of that run.
_N_SAMPLES = 4


@contextmanager
def _letters() -> Iterator[BuildContext]:
    """Yield what factories get in a run over letters: what needs settings of its own refuses these."""
    registry = Registry()
    with tabular_settings(registry) as settings:
        yield make_build(settings, registry)


def _check_tracker(create: Callable[[BuildContext], Any]) -> None:
    check_tracker(create, drives=False)


def _check_source(create: Callable[[BuildContext], DataSource]) -> None:
    with _letters() as build:
        check_source(lambda: create(build), n_samples_per_prompt=_N_SAMPLES)


def _check_buffer(create: Callable[[BuildContext], Buffer]) -> None:
    with _letters() as build:
        check_buffer(lambda: create(build), [group_of([1.0] + [0.0] * (_N_SAMPLES - 1)) for _ in range(3)])


def _check_engine(factory: Callable[[BuildContext], RolloutEngine]) -> str | None:
    if _has_weights(factory):
        return _needs("a model to be started on", "check_engine")
    with _letters() as build:
        check_engine(lambda: factory(build))
    return None


def _check_trainer(factory: Callable[[BuildContext], Trainer]) -> str | None:
    if _has_weights(factory):
        return _needs("a model to be started on", "check_trainer")
    with _letters() as build, tempfile.TemporaryDirectory() as folder:
        check_trainer(lambda: factory(build), Path(folder))
    return None


def _has_weights(factory: Any) -> bool:
    return isinstance(factory, EngineFactory | TrainerFactory) and bool(factory.capabilities.transports)


def _needs(what: str, function: str) -> str:
    return f"it needs {what}; a test calls slime_core.testing.contracts.{function}"


REWARD = Kit(check_reward, refusals=_ANY)
GROUP_REWARD = Kit(check_group_reward, refusals=_ANY)
FILTER = Kit(check_filter, refusals=_ANY)
REWARD_TRANSFORM = Kit(check_reward_transform)
REDUCER = Kit(check_reducer)
TRACKER = Kit(_check_tracker)
GENERATOR = Kit(check_generator, refusals=_ANY)
ENVIRONMENT = Kit(lambda value: _needs("the answers that it is made for", "check_environment"))
ROLLOUT = Kit(check_rollout, refusals=_ANY, patience_s=_RUN_S)
LOOP = Kit(check_loop, refusals=_ANY, patience_s=_RUN_S)
SOURCE = Kit(_check_source, refusals=_ANY)
BUFFER = Kit(_check_buffer, refusals=_ANY)
ENGINE = Kit(_check_engine, refusals=_ANY)
TRAINER = Kit(_check_trainer, refusals=_ANY)
TOKENIZER = Kit(lambda value: _needs("the folder of a model", "check_tokenizer"))
LAUNCHER = Kit(lambda value: _needs("the processes that it starts", "check_launcher"))
