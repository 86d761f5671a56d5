"""Writes rows of an environment of verifiers: `python make_verifiers_rows.py TASKSET FIRST LAST > rows.jsonl`, its tasks from FIRST to LAST."""

from __future__ import annotations

import json
import sys


def main(taskset: str, first: int, last: int) -> None:
    """Print a row for each task."""
    env = {
        "taskset": {"id": taskset},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
    }
    for task in range(first, last + 1):
        told = {"env": env, "task": task, "sampling": {"max_tokens": 8}}
        print(json.dumps({"input": f"{taskset} {task}", "metadata": {"verifiers": told}}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
