"""A loop of your own: stop as soon as the training reward has stayed high for three steps.

slime train recipes/quickstart.toml --loop docs.examples.custom_loop:until_solved
"""

from collections import deque

from slime_core.run.run import Run


async def until_solved(run: Run) -> None:
    """Roll out and train until three steps in a row earned at least 0.95, or the steps are used up."""
    recent: deque[float] = deque(maxlen=3)
    await run.begin()
    for step in run.steps:
        groups = await run.rollout(step)
        rewards = [sample.reward_value() for group in groups for sample in group]
        recent.append(sum(rewards) / len(rewards))
        await run.train(run.batch(step, groups))
        await run.sync_weights(step)
        await run.end_step(step)
        if len(recent) == 3 and min(recent) >= 0.95:
            break
