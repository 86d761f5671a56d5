"""The rollout `default`: groups are generated, scored and filtered by the run's dispatcher."""

from __future__ import annotations

from slime_core.rollout.context import RolloutRun
from slime_core.samples import Group


async def rollout(run: RolloutRun, step: int) -> list[Group]:
    """Return `rollout_batch_size` groups that the filter keeps.

    How they are chosen is the loop's: see `rollout.admission`. Groups that are left over (surplus or aborted) go to the
    buffer, so that no prompt is lost: with `partial_rollout` as they are (see `leftovers`), otherwise as fresh prompts.

    Raises:
        DataError: the filter dropped so much that `dynamic_sampling_max_waves` waves did not fill the batch.
        RewardError: a reward failed and `on_reward_error` is `stop`.
    """
    return await run.next_groups(step)
