"""Saving a run: what goes into a checkpoint beside the trainer's state, and what an interrupted run saves."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.sections import CheckpointSection, TrainSection
from slime_core.deadline import within

if TYPE_CHECKING:
    from slime_core.run import Run


def state_of(run: Run) -> dict[str, Any]:
    """Return the state of everything but the trainer, as JSON values.

    Raises:
        CheckpointError: something in the buffer has no JSON form.
    """
    return {
        "source": run.source.state(),
        "buffer": run.buffer.state(),
        "eval_before": run.eval_before,
        "eval_after": run.eval_after,
        "evaluated_at": run.evaluated_at,
        "wall_s": run.wall_s,
    }


async def write(run: Run, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint from which the run goes on after `step`, and before it the folder of `save_hf`.

    Raises:
        CheckpointError: it cannot be written.
        DeadlineError: it is not written in time.
    """

    async def both() -> None:
        save_hf = run.settings.section(CheckpointSection).save_hf
        if save_hf is not None:
            await run.trainer.save_hf(Path(save_hf.format(step=step, rollout_id=step - 1)))
        await run.checkpoints.save(step, state)

    await in_time(run, both())


async def in_time(run: Run, work: Awaitable[None]) -> None:
    """Await the writing of a checkpoint; raises as `write` does."""
    timeout = run.settings.section(TrainSection).train_timeout_s
    await within(timeout, f"the checkpoint after step {run.done_steps} (--train-timeout-s)", work)


async def save_whole_steps(run: Run) -> None:
    """Write the checkpoint of an interrupted run, of all steps that were trained; nothing where that is there already.

    A step that was not trained is dropped: its prompts are taken again when the run goes on. One that was trained, and not
    evaluated or told to the trackers yet, is so when the run goes on.
    """
    if run.is_training:
        return  # some of a step's optimizer steps are in the trainer
    state, done = run.whole, run.done_steps
    if run.unlogged is not None:
        done = run.done_steps = run.trained_step
        finite = {name: value if math.isfinite(value) else None for name, value in run.unlogged.items()}
        state = state_of(run) | {"unlogged": finite}
    due = run.settings.section(CheckpointSection).due(done, last=True)
    if state is None or not due or done in (0, run.saved_at):
        return
    run.report("save", 0, 1)
    await run.turn_to_trainer()
    await write(run, done, state)
    run.saved_at = done
    run.report("save", 1, 1)
