"""The day that chat templates print: that of a run's first start, so that prompts stay the same when it goes on."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from slime_core.config.derive import run_folder
from slime_core.config.settings import Settings
from slime_core.errors import CheckpointError
from slime_core.protocols import Tokenizer
from slime_core.rundir.checkpoint import to_start_from

#: Its name in a checkpoint's state.
DAY = "template_day"


def set_day(tokenizer: Tokenizer, settings: Settings) -> None:
    """Have the chat template of a tokenizer that can be told the day (`Tokenizer`) print that of the run's first start, or today's."""
    if hasattr(tokenizer, "day"):
        tokenizer.day = first_day(settings)


def first_day(settings: Settings) -> date:
    """Return the day of the first start of the run that a checkpoint is of from which this one goes on; today where there is none."""
    own: Path | None = None if settings.run.overwrite else run_folder(settings) / "checkpoints"
    try:
        found = to_start_from(own, load=settings.checkpoint.load)
        told = None if found is None else found.state().get(DAY)
        return date.fromisoformat(told) if isinstance(told, str) else date.today()
    except (CheckpointError, ValueError):  # which is told when the checkpoint is read for the run
        return date.today()
