"""Which layers one kind of attention takes."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import EngineError
from slime_torch.layers.attention import GroupedQueries
from slime_torch.layers.builder import Builder

from ..conftest import CONFIGS, FAMILIES


def test_the_norms_of_query_and_key_heads_have_one_epsilon():
    architecture = FAMILIES["qwen3"].architecture(CONFIGS["qwen3"]().to_dict())
    builder = Builder(
        architecture,
        shapes={"q": (32,), "k": (32,)},
        max_length=8,
        with_kernels=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kind = GroupedQueries(builder)
    assert kind.join((builder.norm("q", epsilon=0.1), builder.norm("k", epsilon=0.1))) == 0
    with pytest.raises(
        EngineError, match=r"qwen3: found norms .* with the epsilons 0\.1 and 0\.25; wanted the"
    ):
        kind.join((builder.norm("q", epsilon=0.1), builder.norm("k", epsilon=0.25)))
