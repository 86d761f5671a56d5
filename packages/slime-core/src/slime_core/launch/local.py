"""Launcher `local`: every part of the run lives in this process (rewards in its worker processes)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from slime_core.config.settings import Settings
from slime_core.devices.cuda_variables import sees_gpu, set_trainer_defaults
from slime_core.errors import TRACEBACK, Interrupted, RunError, SlimeError, exit_status
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import Placement, assemble
from slime_core.run.run import Run
from slime_core.run.saving import can_save, save_whole_steps
from slime_core.run.start import start
from slime_core.run.tracking import attach
from slime_core.rundir.claim import changes
from slime_core.rundir.rundir import FILE_ALONE, log_to_file
from slime_core.runtime.closing import TELL_S, logged
from slime_core.runtime.deadline import within
from slime_core.runtime.event_loop import run_event_loop
from slime_core.runtime.open_files import allow_open_files
from slime_core.runtime.stop import Stop
from slime_core.runtime.watchdog import WATCHDOG, watching

logger = logging.getLogger(__name__)


def launch[T](settings: Settings, registry: Registry, use: Callable[[Run], Awaitable[T]]) -> T:
    """Assemble the run with all its parts in this process, and return what `use` makes of it.

    Where this process sees a GPU it gets the variables of `devices.cuda_variables` first.

    Args:
        settings: of the run.
        registry: the installed plugins.
        use: starts the run, does something with it, and closes it: `drive`, or an evaluation.

    Raises:
        SlimeError: the run could not be assembled, or what `use` raises.
    """
    if sees_gpu(os.environ):
        set_trainer_defaults()
    return run_event_loop(lambda stop: assemble_and(use, settings, registry, stop=stop))


async def assemble_and[T](
    use: Callable[[Run], Awaitable[T]],
    settings: Settings,
    registry: Registry,
    *,
    placement: Placement | None = None,
    stop: Stop | None = None,
) -> T:
    """Assemble a run, log to its folder while `use` has it, and return what `use` returns. For launchers.

    An error of `use` is logged with its traceback, and a note on it says where.

    Args:
        use: see `launch`.
        settings: of the run.
        registry: the installed plugins.
        placement: see `assemble`; it is closed in any case.
        stop: asks the run to end; from `run_event_loop`.
    """
    allow_open_files()
    async with contextlib.AsyncExitStack() as stack:
        if placement is not None:
            stack.push_async_callback(placement.close)
        run = await assemble(settings, registry, placement=placement)
        run.stop = stop or run.stop
        return await _logged(use, run)


async def _logged[T](use: Callable[[Run], Awaitable[T]], run: Run) -> T:
    """Return what `use` makes of a run, whose folder has a log meanwhile and is released then."""
    handler = log_to_file(run.run_dir)
    watchdog = WATCHDOG.get()
    if watchdog is not None:
        watchdog.start(run.run_dir.path / "log.txt")
    try:
        return await use(run)
    except Exception as error:
        logger.exception("the run failed", extra=FILE_ALONE)
        if not isinstance(error, SlimeError):
            error.add_note(f"{TRACEBACK}{run.run_dir.path / 'log.txt'}")
        raise
    finally:
        run.run_dir.release()
        logging.getLogger().removeHandler(handler)
        handler.close()


def completed(run: Run) -> bool:
    """Say whether an earlier process took all the steps of a run."""
    previous = run.run_dir.read_summary()
    return previous.get("status") == "completed" and previous["steps"] >= run.num_steps


async def drive(run: Run, leaves: Path | None = None) -> dict[str, Any]:
    """Start an assembled run, drive it by its loop to its last step, and close it; returns the summary.

    `summary.json` holds it too. A run that was completed before is left as it is. Errors of trackers and plugins that are
    told of the end, and of parts that are closed, are logged; they change nothing about the run's outcome.

    Args:
        run: as it was assembled.
        leaves: folder that gets the weights of the last step as a Hugging Face model.

    Raises:
        SlimeError: the run could not be started or failed; `summary.json` then says `failed`.
    """
    if completed(run) and (leaves is None or leaves.is_dir()):
        logger.info("completed before; --overwrite starts anew")
        if changed := ", ".join(changes(run.run_dir, run.settings)):
            logger.warning(
                "%s was completed before, with other settings: %s; nothing is trained; --overwrite starts anew",
                run.run_dir.path,
                changed,
            )
        run.run_dir.release()
        return run.run_dir.read_summary()
    summary: dict[str, Any] = {}
    watchdog = WATCHDOG.get()
    if watchdog is not None:
        watchdog.last_words = lambda error: _last_words(run, error)
    try:
        await run.stop.obey("the run", _all_steps(run, leaves))
        summary = run.summary("completed")
        run.run_dir.write_json(run.run_dir.summary.name, summary)
        if watchdog is not None:
            watchdog.last_words = lambda error: 0 if leaves is None else 1  # more stages were to follow
    except BaseException as error:
        cause = _told(error)
        status = "interrupted" if isinstance(cause, Interrupted) else "failed"
        if run.is_recorded:  # else it was refused, and the folder tells of the run before
            if can_save(cause):
                with logged("the steps since the newest checkpoint are lost"):
                    await save_whole_steps(run, cause=cause)
            summary = run.summary(status) | {"error": f"{type(cause).__name__}: {cause}"}
            with logged("summary.json was not written"):
                run.run_dir.write_json(run.run_dir.summary.name, summary)
        if watchdog is not None:
            watchdog.last_words = lambda error: exit_status(cause) if isinstance(cause, SlimeError) else 1
        if cause is error:
            raise
        raise cause from error
    finally:
        try:
            if run.is_recorded:
                _tell(run, summary)
        finally:
            await run.close()
    return summary


async def _all_steps(run: Run, leaves: Path | None) -> None:
    loop = run.registry.resolve("slime.loops", run.settings.run.loop)
    await start(run)
    attach(run.registry, run.trackers)
    run.registry.hooks.slime_run_start(run=run)
    await loop(run)
    await run.finish()
    if leaves is not None:
        timeout = run.settings.train.train_timeout_s
        await run.devices.for_trainer()  # an evaluation may have been last
        with run.stop.held():
            await within(timeout, f"{leaves} (--train-timeout-s)", run.trainer.save_hf(leaves, merged=True))


def _told(error: BaseException) -> BaseException:
    """Return what is raised for an error: one that would end the process silently, or as something else, is a RunError."""
    if isinstance(error, SystemExit):
        return RunError(f"something in the run called sys.exit({error.code!r}); raise an error instead")
    if not isinstance(error, Exception | asyncio.CancelledError):
        return RunError(f"something in the run raised {type(error).__name__}; raise an error instead")
    return error


def _last_words(run: Run, error: SlimeError) -> int:
    """Write the summary of a run that the watchdog or a second signal ends; returns the exit status."""
    cause = run.stop.cause or error
    status = "interrupted" if isinstance(cause, Interrupted) else "failed"
    told = {"error": f"{type(error).__name__}: {error}"}
    if run.is_recorded:
        run.run_dir.write_json(run.run_dir.summary.name, run.summary(status) | told)
    return exit_status(cause)


def _tell(run: Run, summary: Mapping[str, Any]) -> None:
    """Tell trackers and plugins that the run is over; an error of one is logged, and the others are told."""
    told = {"run": run, "summary": summary}
    for answer in reversed(run.registry.hooks.slime_run_end.get_hookimpls()):  # in the order of their calls
        what = f"slime_run_end of {answer.plugin_name}"
        with logged(what), watching(what, TELL_S):
            answer.function(*(told[name] for name in answer.argnames))
