"""The checkpoint of an interrupted run."""

from __future__ import annotations

import math

from slime_core.run.run import Run


async def save_whole_steps(run: Run) -> None:
    """Write a checkpoint of an interrupted run after its last trained step, unless there is one already.

    A step that was not trained is dropped: its prompts are taken again when the run resumes. A step that was trained, but
    not yet evaluated or logged, is evaluated and logged when the run resumes. Nothing is written during a step's training.
    """
    if run.is_training:
        return  # some of a step's optimizer steps are in the trainer
    state, done = run.whole and run.whole(), run.done_steps
    if run.unlogged is not None:
        done = run.done_steps = run.trained_step
        finite = {name: value if math.isfinite(value) else None for name, value in run.unlogged.items()}
        state = run.snapshot()() | {"unlogged": finite}
    due = run.settings.checkpoint.due(done, last=True)
    if state is None or not due or done in (0, run.saved_at):
        return
    run.report("save", 0, 1)
    await run.devices.for_trainer()
    run.run_dir.flush()
    await run.checkpoints.save(done, state)
    run.saved_at = done
    run.report("save", 1, 1)
