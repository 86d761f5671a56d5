"""The reward `random`: what training looks like when the score says nothing."""

from __future__ import annotations

from random import Random

from slime_core.samples import Sample


def random(sample: Sample, *, seed: int = 0) -> float:
    """Return 0.0 or 1.0 with equal chance, always the same for the same `Sample.index` and `seed`."""
    return float(Random(f"{seed}/{sample.index}").randrange(2))
