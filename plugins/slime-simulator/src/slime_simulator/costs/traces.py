"""Traces: how many tokens the prompt and the response of each sample have."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from slime_core.protocols import SamplingParams

#: Bits of a seed that are the index of the sample: see `slime_core.rollout.group.training_params`.
_INDEX = (1 << 40) - 1
#: Of the standard normal distribution: its 99th percentile.
_Z99 = 2.3263478740408408
#: Lengths that are drawn at once.
_BLOCK = 4096


def index_of(params: SamplingParams) -> int:
    """Return the index of the sample that a request of training is for."""
    return (params.seed or 0) & _INDEX


class Trace(Protocol):
    """Lengths by the index of a sample."""

    def prompt_tokens(self, index: int) -> int:
        """Return the tokens of a sample's prompt."""

    def response_tokens(self, index: int) -> int:
        """Return the tokens of a sample's whole response, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """Independent lengths with a long right tail, as those of reasoning are; the same index always has the same length."""

    median: float
    """Tokens of the median response."""
    p99: float
    """Tokens of the 99th percentile, before `longest` cuts it."""
    longest: int
    """Most tokens: the others are cut to it, as `rollout_max_response_len` cuts them."""
    prompt: int = 0
    """Tokens of each prompt."""
    seed: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99 / self.median) / _Z99

    def prompt_tokens(self, index: int) -> int:
        """Return the tokens of the prompt."""
        return self.prompt

    def response_tokens(self, index: int) -> int:
        """Return the length of the index."""
        return int(_drawn(self, index // _BLOCK)[index % _BLOCK])


@functools.lru_cache(maxsize=64)
def _drawn(trace: Lognormal, block: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng([trace.seed, block]).lognormal(math.log(trace.median), trace.sigma, _BLOCK)
    return np.clip(np.rint(drawn), 1, trace.longest).astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """The lengths of a run, by index; further samples begin again at the first."""

    prompts: Sequence[int]
    responses: Sequence[int]

    def prompt_tokens(self, index: int) -> int:
        """Return the tokens of the prompt."""
        return self.prompts[index % len(self.prompts)]

    def response_tokens(self, index: int) -> int:
        """Return the tokens of the response."""
        return max(1, self.responses[index % len(self.responses)])
