"""Data sources."""

from slime_compat.views.samples.sources import AbstractSource as DataSource
from slime_compat.views.samples.sources import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
