"""The loop `fully-async`: generation never stops; weights are sent into running requests."""

from __future__ import annotations

from slime_core.run.run import Run


async def fully_async(run: Run) -> None:
    """Drive `run` to its last step while the dispatcher generates at most `max_staleness` steps ahead."""
    await run.begin()
    async with run.generating_always():
        for step in run.steps:
            groups = await run.rollout(step)
            await run.train(run.batch(step, groups))
            await run.sync_weights(step)
            await run.end_step(step)
