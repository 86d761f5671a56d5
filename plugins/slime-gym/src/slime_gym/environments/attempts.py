"""The environment `attempts`: several attempts at a reasoning-gym problem, each scored by the task's own scorer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, Problem, RewardError, SampleError
from slime_core.protocols import Environment, Observation
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import RewardFailure
from slime_core.rewards.scorer import Scorer
from slime_core.samples import Sample, Status

from slime_gym.problems import ORIGIN_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

SCORE, LEFT = "{score}", "{left}"
#: Name of the scorer among a run's services, and the reward that its workers call.
SERVICE, REWARD = "slime-gym/attempts", "slime_gym.reward:attempt"
#: Worker processes, the seconds that an answer may take one of them, and the memory that it may take.
WORKERS, DEADLINE_S, MEMORY_BYTES = 4, 10.0, 8 * 10**9


class Attempts(Environment):
    """Scores each turn as an answer; ends at a full score or with the last attempt, and else says that it is not right yet.

    The reward is the best score less what the attempts before have earned, so that they add up to the best of all: 1 is full. With
    `partial` off an attempt earns all or nothing. Problems come from the source `gym`.

    Scorers run in worker processes, which the run's conversations share: an answer that a scorer raises for, hangs on or dies of
    scores 0, and the turn's `info` says why.

    Args:
        attempts: how many.
        answer_regex: regular expression whose first group is the answer in a turn; all of it, stripped, when not given.
        partial: give the task's partial scores.
        template: what stands after an attempt that is not right, with `{score}` (0 to 1) and `{left}` attempts.
    """

    def __init__(
        self,
        *,
        attempts: int = 3,
        answer_regex: str | None = None,
        partial: bool = False,
        template: str = "\nNot right. Attempts left: {left}.\n",
    ) -> None:
        if attempts < 1:
            raise ConfigError([Problem("environment_args.attempts", str(attempts), "at least 1")])
        try:
            n_groups = 1 if answer_regex is None else re.compile(answer_regex).groups
        except re.error as error:
            wanted = f"a regular expression ({error})"
            raise ConfigError(
                [Problem("environment_args.answer_regex", repr(answer_regex), wanted)]
            ) from error
        if n_groups < 1:
            wanted = "a group around the answer"
            raise ConfigError([Problem("environment_args.answer_regex", repr(answer_regex), wanted)])
        self._attempts, self._regex, self._partial, self._template = attempts, answer_regex, partial, template
        self._made, self._best = 0, 0.0
        self._services: dict[str, Any] = {}

    def use(self, services: dict[str, Any]) -> None:
        """Share the scorer of the run."""
        self._services = services

    async def reset(self, sample: Sample) -> None:
        """Say nothing: the prompt is the question."""
        self._check(sample)

    async def step(self, sample: Sample, text: str) -> Observation:
        """Score an attempt."""
        self._made += 1
        answer = self._answer(text)
        score, why = (0.0, {}) if answer is None else await self._score(sample, answer)
        score = score if self._partial or score >= 1 else 0.0
        earned, self._best = max(0.0, score - self._best), max(score, self._best)
        left = self._attempts - self._made
        done = score >= 1 or left < 1 or sample.status is Status.TRUNCATED
        said = self._template.replace(SCORE, f"{score:.2f}").replace(LEFT, str(left))
        return Observation(
            content="" if done else said, done=done, reward=earned, info={"score": score} | why
        )

    def state(self) -> dict[str, float]:
        """Return the attempts made and the best score."""
        return {"made": self._made, "best": self._best}

    async def restore(self, sample: Sample, state: Mapping[str, float]) -> None:
        """Go on after the attempts that were made."""
        self._made, self._best = int(state["made"]), float(state["best"])

    def _answer(self, text: str) -> str | None:
        if self._regex is None:
            return text.strip()
        found = re.search(self._regex, text, re.DOTALL)
        return None if found is None else (found[1] or "").strip()

    async def _score(self, sample: Sample, answer: str) -> tuple[float, dict[str, str]]:
        """Return the score of an answer, and where it has none, why."""
        self._check(sample)
        if SERVICE not in self._services:
            self._services[SERVICE] = Scorer({REWARD: 1.0}, pool_of=_pool)
        asked = Sample(
            index=sample.index, response=answer, metadata={ORIGIN_KEY: sample.metadata[ORIGIN_KEY]}
        )
        result = await self._services[SERVICE].score(asked)
        if isinstance(result, RewardFailure):
            if result.kind in ("deadline", "crashed"):
                return 0.0, {"failed": result.message}
            raise RewardError(result.message)
        details = result.value.get("details", {}) if isinstance(result.value, dict) else {}
        return result.score or 0.0, details

    def _check(self, sample: Sample) -> None:
        if ORIGIN_KEY not in sample.metadata:
            raise SampleError(
                f"{sample.name}: metadata has no {ORIGIN_KEY!r}; use --data-source-path gym with this environment"
            )


def _pool(reference: str) -> RewardPool:
    return RewardPool(reference, {}, workers=WORKERS, timeout_s=DEADLINE_S, memory_bytes=MEMORY_BYTES)
