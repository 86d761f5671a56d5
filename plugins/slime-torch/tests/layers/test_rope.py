"""The order in which the engine stores the dimensions of a head, and the tables that rotate them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from slime_core.errors import EngineError
from slime_models.family.families.llama import LLAMA
from slime_torch.layers.rope import rope_tables, rotate_, stored_order

from ..conftest import CONFIGS

HEADS_OF_8 = dataclasses.replace(LLAMA.architecture(CONFIGS["llama"]().to_dict()), head_dim=8)


@pytest.mark.parametrize(
    ("share", "interleaved", "order"),
    [
        (1.0, False, None),
        (1.0, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (0.5, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (0.5, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_what_is_rotated_together_is_stored_half_a_head_apart(share, interleaved, order):
    architecture = dataclasses.replace(
        HEADS_OF_8, partial_rotary_factor=share, rotary_interleaved=interleaved
    )
    assert stored_order(architecture) == order
    # By hand, in the folder's order: pair j of n turns by position * theta ** (-j / n), all else stays.
    x, position, n = torch.arange(1.0, 9.0), 3, int(4 * share)
    wanted = x.clone()
    for j in range(n):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + n)
        angle = torch.tensor(position * architecture.rope_theta ** (-j / n))
        wanted[a], wanted[b] = (
            x[a] * angle.cos() - x[b] * angle.sin(),
            x[b] * angle.cos() + x[a] * angle.sin(),
        )
    places = list(range(8)) if order is None else order
    cosine, sine = (table[position][None, None] for table in rope_tables(architecture, 4))
    found = x[places][None, None].clone()
    rotate_(found, cosine, sine)
    torch.testing.assert_close(found[0, 0], wanted[places], rtol=1e-6, atol=1e-6)


def test_an_odd_number_of_dimensions_is_refused():
    with pytest.raises(
        EngineError, match=r"partial_rotary_factor: found 0\.4, 3 of 8 dimensions; wanted even"
    ):
        stored_order(dataclasses.replace(HEADS_OF_8, partial_rotary_factor=0.4))
