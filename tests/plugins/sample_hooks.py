"""Functions of a user's own that see the samples of a run over letters; they tell by files, as their run may be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path


def newest_first(args, rollout_id, buffer, num_samples):
    """Take the group that came last; of more than two that are left the first is thrown away."""
    taken = [buffer.pop()] if buffer and num_samples else []
    if len(buffer) > 2:
        del buffer[0]
    return taken


def returns_what_it_leaves(args, rollout_id, buffer, num_samples):
    """Forget to take out what it returns."""
    return buffer[:num_samples]


def mark(args, sample, *, rollout_id=None, evaluation=False):
    """Count how often a sample was seen, and by which step."""
    sample.metadata["seen"] = [*sample.metadata.get("seen", []), [rollout_id, evaluation, sample.reward]]


async def mark_again(args, sample, *, rollout_id=None, evaluation=False):
    """Return the sample, after a look at what the hook before did."""
    sample.metadata["seen"] += ["again"]
    return sample


def another(args, sample, *, rollout_id=None, evaluation=False):
    """Give the sample another index."""
    sample.index += 1


def no_evens(args, groups):
    """Train on samples of odd indexes alone."""
    for sample in (sample for group in groups for sample in group):
        if sample.index % 2 == 0:
            sample.remove_sample = True
            if sample.index % 4 == 0:
                sample.metadata["removed_reason"] = "fourth"


def fewer(args, groups):
    """Drop a group, which is not this function's to do."""
    del groups[0]


def tell_all(args, all_groups, get_samples, *, folder: str, more: int = 0):
    """Write down which groups there are, and take some more."""
    seen = sorted(group[0].group_index for group in all_groups)
    taken = [group[0].group_index for group in get_samples(more)]
    with (Path(folder) / "all.txt").open("a") as file:
        file.write(f"{seen} {taken}\n")


def log_rollout(rollout_id, args, samples, metrics, rollout_time, *, folder: str, replaces: bool = True):
    """Log by itself."""
    with (Path(folder) / "log.txt").open("a") as file:
        file.write(f"{rollout_id} {len(samples)} {'rollout/raw_reward' in metrics} {rollout_time > 0}\n")
    return replaces


def log_evaluation(rollout_id, args, data, metrics):
    """Log by itself, and check what it is given."""
    (told,) = data.values()
    assert len(told["rewards"]) == len(told["truncated"]) == len(told["samples"]) == 10
    assert metrics["eval/letters"] == sum(told["rewards"]) / 10
    return True


def equal_is_weak(group, *, weak: bool = True):
    """Drop odd groups, weakly if it is said."""
    from slime_core.protocols import WeakReason

    reason = "odd" if group[0].group_index % 2 else None
    return WeakReason(reason) if weak and reason else reason


class Counts:
    """A sample hook with an option, that is closed when the run is over."""

    def __init__(self, *, file: str) -> None:
        self._file, self._seen = Path(file), 0

    async def __call__(self, args, sample, *, rollout_id, evaluation):
        """Count."""
        self._seen += not evaluation

    async def close(self) -> None:
        """Tell."""
        with self._file.open("a") as file:
            file.write(f"{self._seen}\n")


class WaitsForFile:
    """A sample hook that from the sixth step on goes no further before there is a file, and from the ninth before there is another."""

    def __init__(self, *, file: str, later: str | None = None) -> None:
        self._files = {5: Path(file)} | ({} if later is None else {8: Path(later)})

    async def __call__(self, args, sample, *, rollout_id, evaluation):
        """Wait."""
        while any((rollout_id or 0) >= first and not file.exists() for first, file in self._files.items()):
            await asyncio.sleep(0.05)
