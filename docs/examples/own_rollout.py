"""A rollout function: groups of which the easiest is exchanged for another.

slime train RECIPE --rollout-function-path docs.examples.own_rollout:without_the_easiest
"""

from slime_core.rollout.context import RolloutRun
from slime_core.samples import Group


async def without_the_easiest(run: RolloutRun, step: int) -> list[Group]:
    """Return the groups of two rollouts less the half with the highest mean reward, which is recorded as dropped."""
    groups = [*await run.next_groups(step), *await run.next_groups(step)]
    groups.sort(key=lambda group: sum(float(sample.reward or 0) for sample in group))
    kept, easy = groups[: run.sizes.rollout_batch_size], groups[run.sizes.rollout_batch_size :]
    for group in easy:
        run.record_drop(group, "too_easy")
    return kept
