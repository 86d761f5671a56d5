"""The loop `one-step-off`: each step's groups are generated while the step before is trained."""

from __future__ import annotations

from slime_core.run.run import Run


async def one_step_off(run: Run) -> None:
    """Drive `run` to its last step, generating one step ahead.

    A step's groups all come from the weights before the last update: they are generated between two updates, so that the
    same run always trains on the same samples.
    """
    await run.begin()
    for step in run.steps:
        groups = await run.rollout(step)
        async with run.generating(step + 1):
            await run.train(run.batch(step, groups))
        await run.sync_weights(step)
        await run.end_step(step)
