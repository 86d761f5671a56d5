"""Parts of a replayed run: they do what the recorded ones did, when they did it, and compute nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import EngineError
from slime_core.null.engine import NoEngine
from slime_core.null.trainer import NoTrainer
from slime_core.protocols import (
    Completion,
    EngineCapabilities,
    Fingerprint,
    Metrics,
    SamplingParams,
    TrainerCapabilities,
    TransferPlan,
)
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.rewards.scorer import Result
from slime_core.samples import Group, Sample, TrainBatch

from slime_simulator.costs.traces import index_of
from slime_simulator.replay.recording import FINISHED, TRAINED, Attempt
from slime_simulator.replay.schedule import Schedule


class ReplayedPrompts:
    """A `DataSource` of the groups that were submitted, in the order of their ids. A group is one sample, which stands for all.

    Args:
        groups: their ids.
    """

    def __init__(self, groups: Iterable[int]) -> None:
        self._groups, self._taken = sorted(groups), 0

    def __len__(self) -> int:
        """Return 0: there is no end."""
        return 0

    def take(self, n_groups: int) -> list[Group]:
        """Return the next prompts; behind those that were recorded there are as many more as are wanted."""
        first, self._taken = self._taken, self._taken + n_groups
        known, beyond = len(self._groups), self._groups[-1] + 1 if self._groups else 0
        ids = (self._groups[i] if i < known else beyond + i - known for i in range(first, self._taken))
        return [[Sample(index=group, group_index=group, tokens=[0])] for group in ids]

    def state(self) -> dict[str, Any]:
        """Return how many prompts were taken."""
        return {"taken": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        self._taken = int(state["taken"])


class ReplayedEngine(NoEngine):
    """A `RolloutEngine`, and rewards, by which a group is finished when it was.

    Args:
        attempts: by group, in the order of their submission.
        schedule: of the recorded run.
    """

    capabilities = EngineCapabilities(transports=("memory",))

    def __init__(self, attempts: Mapping[int, Sequence[Attempt]], schedule: Schedule) -> None:
        self._attempts, self._schedule = attempts, schedule
        self._tries: Counter[int] = Counter()
        self._unscored: set[int] = set()
        self._in_flight: set[asyncio.Future[bool]] = set()
        self._version = "0"

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer one id for all tokens of the attempt: what an abort left of it, or the rest.

        Raises:
            EngineError: the group failed in the recorded run.
        """
        group = index_of(params)
        ended, attempt = self._begin(group)
        self._in_flight.add(ended)
        try:
            is_finished = await ended
        finally:
            self._in_flight.discard(ended)
        if is_finished and attempt is not None and attempt.has_raised:
            raise EngineError(f"group {group} failed in the recorded run")
        if is_finished:
            self._unscored.add(group)
        n = attempt.tokens if attempt is not None else 0
        version = self._version if attempt is None or attempt.version is None else attempt.version
        ids = [n] if is_finished or n else []
        return Completion(
            tokens=ids,
            log_probs=[0.0] * len(ids),
            finish_reason="stop" if is_finished else "abort",
            weight_version=version,
        )

    def asks(self, sample: Sample) -> bool:
        """Return True: every sample is scored."""
        return True

    async def score(self, sample: Sample) -> Result:
        """Score a sample: at once behind its generation, else when its group, generated before, was finished again."""
        group = sample.group_index or 0
        if group in self._unscored:
            self._unscored.remove(group)
        else:
            await self._begin(group)[0]
        if self._attempts[group][self._tries[group] - 1].has_failed_reward:
            return RewardFailure(
                kind="raised", message=f"a reward of group {group} failed in the recorded run"
            )
        return Reward(score=1.0, value=1.0, seconds=0.0)

    async def score_group(self, group: Group) -> list[Result]:
        """Score a group, which is one sample."""
        return [await self.score(group[0])]

    async def abort(self) -> None:
        """End every request in flight."""
        for ended in self._in_flight:
            if not ended.done():
                ended.set_result(False)

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Return a plan without a channel: no tensor is sent."""
        return TransferPlan(transport=transport, version=version, dtype="bfloat16")

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take the version."""
        self._version = plan.version
        return {}

    def _begin(self, group: int) -> tuple[asyncio.Future[bool], Attempt | None]:
        """Return what ends the next attempt at a group, and the recorded one, if there is one."""
        number = self._tries[group]
        self._tries[group] += 1
        attempts = self._attempts.get(group, ())
        ended = self._schedule.reached((FINISHED, group, number))
        return ended, attempts[number] if number < len(attempts) else None


class ReplayedTrainer(NoTrainer):
    """A `Trainer` that is done when the recorded one's weights were about to arrive.

    Args:
        schedule: of the recorded run.
        arrived: steps after which weights arrived; others take no time.
    """

    capabilities = TrainerCapabilities(transports=("memory",))

    def __init__(self, schedule: Schedule, arrived: Iterable[int]) -> None:
        self._schedule, self._arrived = schedule, frozenset(arrived)

    async def train(self, batch: TrainBatch) -> Metrics:
        """Wait."""
        if batch.step in self._arrived:
            await self._schedule.reached((TRAINED, batch.step, 0))
        return {}

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send nothing."""
        return {}

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Nothing to do."""
