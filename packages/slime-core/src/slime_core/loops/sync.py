"""The synchronous loop: roll out, train, sync, again. On-policy: each rollout uses the newest weights."""

from __future__ import annotations

from slime_core.run.run import Run


async def sync(run: Run) -> None:
    """Drive `run` to its last step, one phase after the other."""
    await run.begin()
    for step in run.steps:
        groups = await run.rollout(step)
        await run.train(run.batch(step, groups))
        await run.sync_weights(step)
        await run.end_step(step)
