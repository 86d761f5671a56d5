"""Returns of turns, and when no further turn is worth it."""

from __future__ import annotations

from collections.abc import Sequence

#: Stop when a kernel is this much more than merely correct: twice as fast as the baseline.
_ENOUGH_BONUS = 1.0
FAST, HOPELESS, MAX_TURNS = "fast_enough", "all_failed", "max_turns"


def trajectory_return(rewards: Sequence[float], gamma: float) -> float:
    """Return R = sum over turns t from 0 of gamma^t r_t: what one sample for all turns gets.

    Source: the kernel fork, whose code has this form alone.
    """
    return sum(gamma**turn * reward for turn, reward in enumerate(rewards))


def turn_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return R_t = sum over i >= t of gamma^(i - t) r_i of each turn t: what a sample for each turn gets.

    Source: the documentation of the kernel fork; Kevin (arXiv 2507.11948).
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def ended_by(rewards: Sequence[float], *, correct_reward: float, max_turns: int) -> str | None:
    """Return why no turn follows these; None where one does."""
    if rewards and rewards[-1] >= correct_reward + _ENOUGH_BONUS:
        return FAST
    if len(rewards) >= max_turns:
        return MAX_TURNS
    if len(rewards) > 1 and not any(rewards):
        return HOPELESS
    return None
