"""A tracker that writes the phase under way into a file, so that a test can act in the middle of it.

`HOLD_SAVE_OF_STEP=6` gives the thread by which Megatron's trainer writes something else to do before that step's checkpoint.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.build import BuildContext


class PhaseFile:
    """Writes `step phase` for every phase that begins or moves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run_start(self, run: Any) -> None:
        self._trainer = run.trainer

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(f"{step} {phase} {done} {total}")
        os.replace(temporary, self._path)
        if phase == "save" and done == 0 and os.environ.get("HOLD_SAVE_OF_STEP") == str(step):
            self._trainer._learner._saver._thread.submit(threading.Event().wait)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def run_end(self, summary: Mapping[str, Any]) -> None:
        pass


def create_tracker(build: BuildContext) -> PhaseFile:
    return PhaseFile(build.run_dir / "phase")
