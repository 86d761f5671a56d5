"""Clusters that tests of several files run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_node() -> Iterator[None]:
    """A cluster of one machine with eight GPUs, which runs in this process use as it is."""
    from slime_ray.launcher import set_environment

    set_environment()
    import ray

    ray.init(address="local", num_cpus=8, num_gpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
