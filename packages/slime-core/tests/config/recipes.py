"""A recipe with all that a run must be told, and what a function finds wrong with settings."""

from __future__ import annotations

import pytest
from slime_core.errors import ConfigError

RECIPE = """
[model]
hf_checkpoint = "m"
[rollout]
rollout_batch_size = 4
n_samples_per_prompt = 2
rollout_max_response_len = 8
"""


def problems(function, *args) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        function(*args)
    return [str(problem) for problem in caught.value.problems]
