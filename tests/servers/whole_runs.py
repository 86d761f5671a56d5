"""What a run of `sglang_run` has measured and sampled, and that all of it is there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from slime_core.rundir.records import read_records


def metrics(run: Path) -> list[dict[str, float]]:
    """What was measured of each step, and of the evaluation before them, but for times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def samples(run: Path, step: int) -> list[dict]:
    return list(read_records(run / f"rollouts/step_{step:06}.jsonl"))


def check_whole(run: Path, *, limit: float = 1e-5) -> None:
    """Check that every step is there, each sample once, from the newest weights, and that trainer and servers agree."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(0 <= row["train/train_rollout_logprob_abs_diff"] < limit for row in rows[1:])
    assert all("eval/letters" in rows[number] for number in (0, 2, 4))
    assert len({row["train/grad_norm"] for row in rows[1:]} - {0.0}) == 4  # each step learns
    for step in range(1, 5):
        assert {version for each in samples(run, step) for version in each["weight_versions"]} == {
            str(step - 1)
        }
    used = Counter(each["index"] for step in range(1, 5) for each in samples(run, step))
    assert used == Counter(range(4 * 4 * 4))
