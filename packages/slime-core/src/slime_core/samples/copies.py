"""`copied`: a group as it is at a moment, for a checkpoint that may be written later."""

from __future__ import annotations

import copy

from slime_core.samples.sample import Group


def copied(group: Group) -> Group:
    """Return the group as it is now: what generators do to its samples later leaves the copies as they are."""
    copies = [copy.copy(sample) for sample in group]
    for one in copies:
        one.tokens = one.tokens[:]
        for column in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            if (values := getattr(one, column)) is not None:
                setattr(one, column, values[:])
        one.weight_versions = one.weight_versions.copy()
        one.weight_version_starts = one.weight_version_starts.copy()
        one.metadata = one.metadata.copy()
        one.spec_info = one.spec_info.copy()
        one.prefix_cache_info = one.prefix_cache_info.copy()
        one.timings = one.timings.copy()
    return copies
