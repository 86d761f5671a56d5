"""Continuing a partial response: sampling parameters of the remaining tokens, and stop strings across the seam.

The sample's seed stays the same: engines draw by seed and position in the whole sequence, so the continuation has the
tokens that an uninterrupted response would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slime_core.protocols.engine import SamplingParams
from slime_core.protocols.tokenizer import Tokenizer

#: Tokens decoded beyond those that can spell a stop string: the first of a tail may lose a leading space.
_SLACK = 4


def params_after(params: SamplingParams, n_tokens: int) -> SamplingParams:
    """Return how to sample what follows the first `n_tokens` of a response; `max_new_tokens` may come out below 1."""
    if not n_tokens:
        return params
    return dataclasses.replace(
        params,
        max_new_tokens=params.max_new_tokens - n_tokens,
        min_new_tokens=max(0, params.min_new_tokens - n_tokens),
    )


def stop_across(tokens: Sequence[int], seam: int, params: SamplingParams, tokenizer: Tokenizer) -> int | None:
    """Return the length of a response whose stop string begins before a seam and ends after it; None without one.

    An engine looks for stop strings in what it generates, not in what it is given.

    Args:
        tokens: the response.
        seam: how many of them were given to the engine that generated the others.
        params: of the whole response.
        tokenizer: decodes the tokens around the seam.
    """
    if not params.stop:
        return None
    longest = max(len(stop.encode()) for stop in params.stop)  # a token that is text has at least one byte

    def decode(end: int) -> str:
        return tokenizer.decode(
            tokens[max(0, seam - longest - _SLACK) : end], skip_special_tokens=params.skip_special_tokens
        )

    before = decode(seam)
    for end in range(seam + 1, min(len(tokens), seam + longest) + 1):
        text = decode(end)
        if end >= params.min_new_tokens and any(
            text.rfind(stop) > before.rfind(stop) for stop in params.stop
        ):
            return end
        before = text
    return None
