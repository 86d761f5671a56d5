"""Factories of engines and trainers: how they are built, and their capabilities before that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext, MemoryQuestion
from slime_core.errors import PluginError
from slime_core.protocols import EngineCapabilities, EngineGpus, RolloutEngine, Trainer, TrainerCapabilities
from slime_core.protocols.memory import MemoryEstimate, Remedy

if TYPE_CHECKING:
    from slime_core.config.sections import RolloutSection, TrainSection
    from slime_core.plugins.registry import Registry


def _unknown(build: BuildContext) -> None:
    """Return None: not known."""


def _nothing(question: MemoryQuestion) -> Sequence[Any]:
    """Return nothing: not known."""
    return ()


def _imports_nothing() -> None:
    """Import nothing."""


def _no_process(build: BuildContext) -> EngineGpus:
    """Return that no process is started."""
    return EngineGpus()


@dataclass(frozen=True)
class EngineFactory:
    """An entry point of `slime.engines`. A plain function is enough for an engine without special capabilities."""

    create: Callable[[BuildContext], RolloutEngine]
    """Builds the engine."""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """What it can do, whatever the settings; the engine's own `capabilities` are these, or fewer."""
    context_limit: Callable[[BuildContext], int | None] = _unknown
    """Returns the most tokens of prompt and response that it takes; None where that is not known."""
    memory: Callable[[MemoryQuestion], Sequence[MemoryEstimate]] = _nothing
    """Returns the memory that its ranks would take; empty where that is not known."""
    remedies: Callable[[MemoryQuestion], Sequence[Remedy]] = _nothing
    """Returns changes of settings by which it would take less, each allowed by its own checks."""
    gpus: Callable[[BuildContext], EngineGpus] = _no_process
    """Returns the GPUs of the processes that it starts; a launcher may have a `BuildContext.places` for each of them."""
    transport: Callable[[BuildContext], str | None] = _unknown
    """Returns the transport of weights that suits where its processes are, for runs that ask for none; None leaves the choice to
    `slime_core.weights.sync.choose_transport`."""

    def __call__(self, build: BuildContext) -> RolloutEngine:
        """Return a new engine, not started."""
        return self.create(build)


@dataclass(frozen=True)
class TrainerFactory:
    """An entry point of `slime.trainers`. A plain function is enough for a trainer without special capabilities."""

    create: Callable[[BuildContext], Trainer]
    """Builds the trainer."""
    capabilities: TrainerCapabilities = field(default_factory=TrainerCapabilities)
    """What it can do, whatever the settings; the trainer's own `capabilities` are these, or fewer."""
    checkpoint_bytes: Callable[[BuildContext], int | None] = _unknown
    """Returns about how many bytes a checkpoint takes; None where that is not known."""
    memory: Callable[[MemoryQuestion], Sequence[MemoryEstimate]] = _nothing
    """Returns the memory that its ranks would take, those of a pipeline stage together; empty where that is not known."""
    remedies: Callable[[MemoryQuestion], Sequence[Remedy]] = _nothing
    """Returns changes of settings by which it would take less, each allowed by its own checks."""
    imports: Callable[[], object] = _imports_nothing
    """Imports what the trainer would import when it is started, and changes nothing else. A launcher may call it in a process of a
    rank while the run is still being checked."""

    def __call__(self, build: BuildContext) -> Trainer:
        """Return a new trainer, not started."""
        return self.create(build)


def factory_misfit(value: Any, wanted: type[EngineFactory] | type[TrainerFactory]) -> str | None:
    """Return what is wrong with what an entry point of engines or trainers is; None where it builds one.

    Args:
        value: the object, which can be called with a build context.
        wanted: the class of factory.
    """
    if not isinstance(value, EngineFactory | TrainerFactory):
        return None
    if not isinstance(value, wanted):
        return f"{_a(value)}; wanted {wanted.__name__}"
    about = EngineCapabilities if wanted is EngineFactory else TrainerCapabilities
    if not isinstance(value.capabilities, about):
        return f"capabilities that are {_a(value.capabilities)}; wanted {about.__name__}"
    parts = [part.name for part in fields(value) if part.name != "capabilities"]
    loose = [name for name in parts if not callable(getattr(value, name))]
    return f"{loose[0]} that is {_a(getattr(value, loose[0]))}; wanted a function" if loose else None


def _checked(value: Any, wanted: type[EngineFactory] | type[TrainerFactory], name: str) -> Any:
    if (why := factory_misfit(value, wanted)) is not None:
        raise PluginError(f"{name}: found {why}")
    return value


def _a(value: Any) -> str:
    return f"of the type {type(value).__name__}"


def engine_factory(rollout: RolloutSection, registry: Registry) -> EngineFactory:
    """Return the factory of the chosen engine."""
    name = rollout.rollout_engine
    found = _checked(registry.resolve("slime.engines", name), EngineFactory, f"the engine {name}")
    return found if isinstance(found, EngineFactory) else EngineFactory(found)


def trainer_factory(train: TrainSection, registry: Registry) -> TrainerFactory:
    """Return the factory of the chosen trainer."""
    name = train.train_backend
    found = _checked(registry.resolve("slime.trainers", name), TrainerFactory, f"the trainer {name}")
    return found if isinstance(found, TrainerFactory) else TrainerFactory(found)
