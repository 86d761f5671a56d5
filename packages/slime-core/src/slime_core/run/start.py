"""Starting an assembled run: its checkpoint is verified before anything is written."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AllowInfNan, BaseModel, ConfigDict

from slime_core.errors import CheckpointError, SampleError
from slime_core.files.strict_read import Counted, Unreadable, checked
from slime_core.protocols import Buffer, DataSource
from slime_core.run.run import Run
from slime_core.rundir import checkpoint
from slime_core.rundir.checkpoint import Checkpoint
from slime_core.rundir.claim import record
from slime_core.rundir.events import LOOP
from slime_core.runtime.deadline import within
from slime_core.runtime.garbage import spare_the_collector
from slime_core.runtime.openmp import release_threads
from slime_core.runtime.progress import ON_TERMINAL

logger = logging.getLogger(__name__)

_Finite = Annotated[float, AllowInfNan(False)]


class _State(BaseModel):
    """State of everything but the trainer, as a checkpoint holds it."""

    model_config = ConfigDict(strict=True, frozen=True)
    step: Counted
    source: dict[str, Any]
    buffer: dict[str, Any]
    eval_before: _Finite | None
    eval_after: _Finite | None
    evaluated_at: Counted | None
    wall_s: Annotated[_Finite, Ge(0)]
    largest_logprob_diff: Annotated[_Finite, Ge(0)] | None = None
    unlogged: dict[str, float | None] | None = None
    template_day: str | None = None
    dispatcher: dict[str, Any] = {"groups": []}
    ahead: list[dict[str, Any]] = []
    begun: list[dict[str, Any]] = []


async def start(run: Run, *, trains: bool = True) -> None:
    """Start every part of an assembled run, and restore the checkpoint that it resumes from.

    Until that is accepted nothing is written that an earlier run left, and what is cheap to refuse is looked at first. Only a
    checkpoint that a save had put aside when it was killed gets its name again before.

    Args:
        run: as it was assembled.
        trains: whether it goes on with the checkpoint's data and groups, too; one that only evaluates has the weights and the step.

    Raises:
        CheckpointError: the checkpoint is of another model or other data, or incomplete.
        SlimeError: a part cannot be started.
    """
    load = run.settings.checkpoint.load
    checkpoint.bring_back(run.run_dir.checkpoints)
    found = checkpoint.to_start_from(run.run_dir.checkpoints, load=load)
    goes_on = found is not None and found.path.parent == run.run_dir.checkpoints
    if found is not None and goes_on:  # another run's was before the folder was made
        await asyncio.to_thread(found.verify)
    if (
        not run.run_dir.config.exists()
    ):  # nothing is overwritten, and the folder is known for a run's from now on
        _record(run, goes_on=goes_on)
    if found is not None:
        _restore(run, found, trains=trains)
    logger.info("starting the trainer: the model is built and its weights are read", extra=ON_TERMINAL)
    with run.events.timed("start_trainer", lane=LOOP, step=run.done_steps):
        await run.trainer.start()
    if found is not None:
        with run.events.timed("load", lane=LOOP, step=run.done_steps):
            await _load(run, found)
        logger.info("resumed from %s: next step is %d", found.path, run.start_step)
    _record(run, goes_on=goes_on)
    await run.devices.for_engine()
    logger.info("starting the engine", extra=ON_TERMINAL)
    with run.events.timed("start_engine", lane=LOOP, step=run.done_steps):
        await run.engine.start()
    if run.scorer is not None:
        with run.events.timed("start_rewards", lane=LOOP, step=run.done_steps):
            await run.scorer.start()
    checkpoint.clean(run.run_dir.checkpoints)
    run.run_dir.rewind(run.done_steps, logs_it=run.unlogged is not None)
    run.events.start(run.start_step)
    release_threads()  # what a part computed on this thread is done
    spare_the_collector()


async def _load(run: Run, found: Checkpoint) -> None:
    """Have the trainer restore its part of a checkpoint.

    Raises:
        DeadlineError: it took longer than what saving may take.
    """
    timeout_s = run.settings.train.train_timeout_s
    what = f"loading the checkpoint {found.path} (--train-timeout-s)"
    await within(timeout_s, what, run.trainer.load(found.trainer))


def _record(run: Run, *, goes_on: bool) -> None:
    if not run.is_recorded:
        record(run.run_dir, run.settings, run.registry, goes_on=goes_on)
        run.is_recorded = True


def _restore(run: Run, found: Checkpoint, *, trains: bool) -> None:
    """Take on the state of a checkpoint but for the trainer's.

    Raises:
        CheckpointError: it is of other data, or incomplete.
    """
    path = found.path / checkpoint.STATE
    try:
        state = checked(_State, found.state())
        if state.step != found.step:
            raise Unreadable(f"step {state.step}, which the folder's name contradicts")
    except Unreadable as error:
        raise CheckpointError(f"{path}: found {error}; wanted the state that a save writes") from error
    if trains:
        _restore_data(run, state, path)
    run.eval_before, run.eval_after, run.evaluated_at = (
        state.eval_before,
        state.eval_after,
        state.evaluated_at,
    )
    run.wall_before_s = state.wall_s
    run.log_prob_gate.largest = state.largest_logprob_diff
    run.start_step, run.done_steps = found.step + 1, found.step
    is_own = found.path.parent == run.run_dir.checkpoints
    if is_own and state.unlogged is not None:
        run.unlogged = {name: math.nan if value is None else value for name, value in state.unlogged.items()}
    run.saved_at = found.step if is_own else None


def _restore_data(run: Run, state: _State, path: Path) -> None:
    """Take on where the prompts are, and the groups that were taken and not trained on."""
    _restore_part(run.source, state.source, f"{path}: source")
    _restore_part(run.buffer, state.buffer, f"{path}: buffer")
    try:
        run.restore_groups(dispatcher=state.dispatcher, ahead=state.ahead, begun=state.begun)
    except (KeyError, TypeError, ValueError, SampleError) as error:
        raise CheckpointError(
            f"{path}: found groups in flight that cannot be read ({type(error).__name__}: {error}); wanted those of a save"
        ) from error


def _restore_part(part: DataSource | Buffer, state: dict[str, Any], where: str) -> None:
    """Have a source or buffer, which may be a plugin's, take on its state."""
    try:
        part.restore(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: found a state that {type(part).__name__} cannot read ({type(error).__name__}: {error}); wanted one "
            "that it wrote: go on with the plugins of the run"
        ) from error
