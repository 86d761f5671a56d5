"""The last checkpoint of a run that is interrupted, or ended by an error that is not the trainer's."""

from __future__ import annotations

import math

from slime_core.errors import (
    CheckpointError,
    DeadlineError,
    Interrupted,
    RolloutTimeout,
    TrainerError,
    WeightSyncError,
)
from slime_core.run.run import Run

#: Errors after which the trainer may not answer, or has nowhere to write to.
_OF_TRAINER = (CheckpointError, DeadlineError, TrainerError, WeightSyncError)


def can_save(cause: BaseException) -> bool:
    """Return whether the trainer can be asked for a checkpoint when a run was ended so: by a signal, or by what generates."""
    if isinstance(cause, Interrupted | RolloutTimeout):
        return True
    return isinstance(cause, Exception) and not isinstance(cause, _OF_TRAINER)


async def save_whole_steps(run: Run, *, cause: BaseException | None = None) -> None:
    """Write a checkpoint of a run that ends early after its last trained step, unless there is one already.

    A step that was not trained is dropped: its prompts are taken again when the run resumes. A step that was trained, but
    not yet evaluated or logged, is evaluated and logged when the run resumes. Nothing is written during a step's training.

    Args:
        run: as its loop left it.
        cause: what ended it.
    """
    if run.is_training:
        return  # some of a step's optimizer steps are in the trainer
    state, done = run.whole and run.whole(), run.done_steps
    if run.unlogged is not None:
        ended_in_it = not isinstance(cause, Interrupted | None) and run.done_steps < run.trained_step
        if ended_in_it and run.saved_at == run.trained_step - 1:
            return  # what was generated beside this step is lost by an error: from the step before, the run goes on exactly
        done = run.done_steps = run.trained_step
        finite = {name: value if math.isfinite(value) else None for name, value in run.unlogged.items()}
        state = run.snapshot()() | {"unlogged": finite}
    due = run.settings.checkpoint.due(done, last=True)
    if state is None or not due or done in (0, run.saved_at):
        return
    run.report("save", 0, 1)
    await run.devices.for_last_save()
    run.run_dir.flush()
    await run.checkpoints.save(done, state)
    run.saved_at = done
    run.report("save", 1, 1)
