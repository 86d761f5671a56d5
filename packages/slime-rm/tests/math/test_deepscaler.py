"""The reward `deepscaler`."""

from slime_core.samples import Sample
from slime_rm.math.deepscaler import deepscaler


def test_deepscaler_can_require_a_thought():
    sample = Sample(response=r"\boxed{5}", label="5")
    assert deepscaler(sample).score == 1.0
    assert deepscaler(sample, require_thought=True).score == 0.0
