"""A reward that imports in the process of a run, and not in one that Ray started."""

import os

from slime_core.testing.tabular import next_letter  # noqa: F401  # it is the reward

if "RAY_RAYLET_PID" in os.environ:
    raise ImportError("does not import in a process of a cluster")
