"""What all tests of simulations share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Keep what is there from collections: each simulated run ends with one, which in a process that has imported Megatron takes 0.3 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
