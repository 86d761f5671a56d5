"""The loop `rollout-only`: each step generates and scores, and nothing is trained. For the trainer `none`."""

from __future__ import annotations

from slime_core.run.run import Run


async def rollout_only(run: Run) -> None:
    """Drive `run` to its last step; every step's samples and metrics are recorded."""
    await run.begin()
    for step in run.steps:
        await run.rollout(step)
        await run.end_step(step)
