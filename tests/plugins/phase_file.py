"""A tracker that writes the current phase into a file, so that a test can act in the middle of it.

`HOLD_SAVE_OF_STEP=6` gives the thread by which Megatron's trainer writes something else to do before that step's checkpoint.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl


class PhaseFile:
    """Writes `step phase` for every phase that begins or moves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def slime_run_start(self, run: Any) -> None:
        self._trainer = run.trainer

    @hookimpl
    def slime_progress(self, step: int, phase: str, done: int, total: int) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(f"{step} {phase} {done} {total}")
        os.replace(temporary, self._path)
        if phase == "save" and done == 0 and os.environ.get("HOLD_SAVE_OF_STEP") == str(step):
            self._trainer._learner._checkpoint_writer._thread.submit(threading.Event().wait)


def create_tracker(build: BuildContext) -> PhaseFile:
    return PhaseFile(build.run_dir / "phase")
