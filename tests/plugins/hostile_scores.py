"""Rewards that harm whom they can; of `reward`, the label says which of `packages/slime-core/tests/hostile_rewards.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

#: What fails, or has nobody left who could answer.
NAMES = (
    "kill its fork server", "kill_its_guard", "stop its fork server", "stop_its_guard_and_fork_server", "become_a_daemon", "fork_and_fork",
    "close everything", "forge too many", "forge a failure of the fork server", "write_garbage", "hang", "swallow_signals",
    "memory", "segfault", "exit", "nan",
)  # fmt: skip
#: Flags of a run that survives them: two samples a group, a deadline and a limit of memory.
FLAGS = (
    "--label-key", "label", "--no-rollout-shuffle", "--rm-type", "hostile_scores:reward", "--n-samples-per-prompt", "2",
    "--reward-workers", "2", "--reward-timeout-s", "6", "--reward-memory-gb", "2", "--eval-interval", "none",
    "--num-rollout", "4",
)  # fmt: skip


def write_rows(path: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Write rows of one letter, each hostile one before one that is not."""
    labels = [label for name in names for label in (name, "")]
    rows = [{"input": chr(97 + i % 26), "label": label} for i, label in enumerate(labels)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def reward(sample: Any) -> Any:
    from hostile_rewards import HOSTILE  # not above: tests read the names without it

    return HOSTILE[sample.label][0](sample) if sample.label else float(ord((sample.response or "a")[0]) % 2)


def check_dropped(run: Path) -> None:
    """Check that each hostile sample failed by its name, and that the others, and only they, were trained on."""
    log = (run / "log.txt").read_text(errors="replace")
    n_samples = 2
    hostile = [2 * i * n_samples + j for i in range(len(NAMES)) for j in range(n_samples)]
    assert [index for index in hostile if f"sample {index}: reward hostile_scores:reward " not in log] == []
    steps = sorted((run / "rollouts").glob("step_*.jsonl"))
    trained = [json.loads(line)["index"] for step in steps for line in step.read_text().splitlines()]
    assert sorted(trained) == sorted(set(range(2 * len(NAMES) * n_samples)) - set(hostile))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rollout/reward_errors", 0) for row in rows) == len(NAMES)


async def stubborn_reward(sample: Any) -> float:
    """Await for ever, and answer every cancellation by awaiting again."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
