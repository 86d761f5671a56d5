"""When something periodic is due."""

from __future__ import annotations


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Return whether an action is due after a rollout: every `interval` rollouts, at the end of an epoch, and after the last.

    Args:
        rollout_id: from 0.
        interval: rollouts; None never.
        num_rollout_per_epoch: rollouts of an epoch; None without epochs.
        num_rollout: of the run; None where the last is none of its own.
    """
    if interval is None:
        return False
    done = rollout_id + 1
    ends = [interval] + ([num_rollout_per_epoch] if num_rollout_per_epoch else [])
    return done == num_rollout or any(done % each == 0 for each in ends)
