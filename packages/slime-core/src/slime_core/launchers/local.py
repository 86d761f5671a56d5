"""Launcher `local`: every part of the run lives in this process (rewards in its worker processes)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime_core.assemble import assemble, start
from slime_core.config.sections import RunSection
from slime_core.config.settings import Settings
from slime_core.plugins.registry import Registry
from slime_core.run import Run
from slime_core.rundir import log_to_file

logger = logging.getLogger(__name__)


def launch(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Run to the end in this process and return the summary, which `summary.json` holds too.

    Raises:
        SlimeError: the run could not be started or failed; `summary.json` then says `failed`.
    """
    return asyncio.run(_launch(settings, registry))


async def _launch(settings: Settings, registry: Registry) -> dict[str, Any]:
    run = await assemble(settings, registry)
    handler = log_to_file(run.run_dir)
    try:
        return await drive(run)
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


async def drive(run: Run) -> dict[str, Any]:
    """Start an assembled run, drive it by its loop to its last step, and close it; returns the summary.

    A run that was completed before is left as it is.
    """
    previous = run.run_dir.read_summary()
    if previous.get("status") == "completed" and previous["steps"] >= run.num_steps:
        logger.info("completed before; --overwrite starts anew")
        return previous
    loop = run.registry.resolve("slime.loops", run.settings.section(RunSection).loop)
    summary: dict[str, Any] = {}
    try:
        await start(run)
        for tracker in run.trackers:
            tracker.run_start(run)
        run.registry.hooks.slime_run_start(run=run)
        await loop(run)
        await run.finish()
        summary = run.summary("completed")
    except BaseException as error:
        summary = run.summary("failed") | {"error": f"{type(error).__name__}: {error}"}
        logger.exception("the run failed")
        raise
    finally:
        run.run_dir.write_json("summary.json", summary)
        for tracker in run.trackers:
            tracker.run_end(summary)
        run.registry.hooks.slime_run_end(run=run, summary=summary)
        await run.close()
    return summary
