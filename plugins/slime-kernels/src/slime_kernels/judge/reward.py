"""The reward of a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from slime_kernels.judge.verdict import Verdict
from slime_kernels.section import KernelsSection


@dataclass(frozen=True, kw_only=True)
class RewardScale:
    """What each gate is worth. Source: the fork's first revision; 1.0 for `correct` is its second's."""

    compiled: float = 0.1
    correct: float = 0.3
    most_bonus: float = 2.0

    def reward(self, verdict: Verdict) -> float:
        """Return nothing, `compiled`, or `correct` and min(max(speedup - 1, 0), most_bonus)."""
        if verdict.correct:
            return self.correct + min(max(verdict.speedup - 1.0, 0.0), self.most_bonus)
        return self.compiled if verdict.compiled else 0.0


def scale_of(section: KernelsSection) -> RewardScale:
    """Return the scale that the settings want."""
    return RewardScale(
        compiled=section.compiled_reward, correct=section.correct_reward, most_bonus=section.most_bonus
    )
