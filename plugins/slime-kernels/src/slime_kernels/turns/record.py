"""What a trajectory's samples have of it in their metadata."""

from __future__ import annotations

#: Key of `Sample.metadata`: the history of a trajectory, its rewards, and what ended it.
TURNS_KEY = "kernel_turns"
