"""`RolloutRun`: the part of a run that rollout functions may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from slime_core.config.derive import BatchSizes
from slime_core.config.settings import Settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import GenerateFn, Metrics, RolloutEngine, SamplingParams, Tokenizer
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.rollout.user_hooks import RolloutHooks
from slime_core.rundir.events import EventLog
from slime_core.samples import Group, Sample


class RolloutRun(Protocol):
    """A run, as rollout functions see it; `slime_core.run.run.Run` is one."""

    settings: Settings
    registry: Registry
    tokenizer: Tokenizer
    engine: RolloutEngine
    generate: GenerateFn
    """The chosen generator."""
    scorer: Scorer | None
    """The chosen rewards; None where there are none."""
    sizes: BatchSizes
    vocab_size: int | None
    """Token ids of samples must be below it; None if it is not known."""
    engine_context_len: int | None
    """Most tokens of prompt and response that the engine takes; None if it does not say."""
    events: EventLog
    """Takes down what happens and when."""
    user_hooks: RolloutHooks
    """Functions of a user's own that see samples and groups."""
    services: dict[str, Any]
    """What plugins started for the run and share, by a name of theirs; closed with it (`close`)."""

    @property
    def concurrency(self) -> ConcurrencyLimit:
        """What requests to the engine pass; see `rollout.abortable.AbortableEngine`."""

    @property
    def generating_step(self) -> int:
        """The step that the next groups are for."""

    def where(self, sample: Sample) -> str:
        """Return how messages name a training sample: with the place of its prompt in the data, if that is known."""

    def drop_reason(self, group: Group, /) -> str | None:
        """Ask the dynamic sampling filter: return why a group is dropped, None to keep it."""

    async def next_groups(self, step: int) -> list[Group]:
        """Return the groups that the dispatcher has for a step: generated, scored, and kept by the filter."""

    def take(self, n_groups: int) -> list[Group]:
        """Return groups to generate: those that wait in the buffer first, then new ones."""

    def keep_for_later(self, groups: Sequence[Group], *, given: Sequence[Group]) -> None:
        """Put surplus and aborted groups into the buffer; `given` are the same as they were submitted."""

    def sampling_params(self, sample: Sample) -> SamplingParams:
        """Return how a training sample is drawn."""

    async def score(self, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        """Score samples in place, if there is a reward; events say whether it is an evaluation."""

    def add_metrics(self, metrics: Metrics) -> None:
        """Add metrics to those of the step that is generated."""

    def put(self, groups: Sequence[Group]) -> None:
        """Put groups into the buffer as they are."""

    def record_drop(self, group: Group, reason: str) -> None:
        """Record a scored group that the step does not train on, and why."""

    def report(self, phase: str, done: int, total: int) -> None:
        """Tell trackers and plugins how far a phase is."""


#: Async `(run, step) -> groups`: a whole rollout.
RolloutFn = Callable[[RolloutRun, int], Awaitable[list[Group]]]
