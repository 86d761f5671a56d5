"""Soft overlong punishment (DAPO): a penalty for responses close to the length limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    response_lengths: NDArray[np.int64],
    *,
    max_response_len: int,
    overlong_buffer_len: int,
    overlong_penalty_factor: float = 1.0,
) -> NDArray[np.float64]:
    """Return what to add to each reward [N]: 0, falling to −factor over the last `overlong_buffer_len` tokens.

    −factor · clip((length − (max_response_len − overlong_buffer_len)) / overlong_buffer_len, 0, 1).

    Args:
        response_lengths: [N] tokens of each response that were generated: `max_response_len` does not count an environment's.
        max_response_len: most generated tokens of a response.
        overlong_buffer_len: tokens over which the reward falls.
        overlong_penalty_factor: what a response of full length loses.

    Source: DAPO, arXiv 2503.14476, eq. 13; verl `DAPORewardManager`, which has no floor beyond the limit; TRL
    `get_soft_overlong_punishment`.
    """
    over = (response_lengths - (max_response_len - overlong_buffer_len)) / overlong_buffer_len
    penalty: NDArray[np.float64] = -overlong_penalty_factor * np.clip(over, 0.0, 1.0)
    return penalty
