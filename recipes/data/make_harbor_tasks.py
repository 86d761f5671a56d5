"""Writes a set of Harbor task folders: products that are to be written to a file. `python make_harbor_tasks.py FOLDER [N]`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

INSTRUCTION = """\
Solve each task with one shell command, then say done.

Task: write 23 * 41 to answer.txt
<bash>echo $((23 * 41)) > answer.txt</bash>
<output>
</output>
done

Task: write {a} * {b} to answer.txt
"""
TEST = """\
if [ "$(cat /app/answer.txt)" = "{product}" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
TASK = """\
schema_version = "1.1"

[metadata]
category = "arithmetic"

[verifier]
timeout_sec = 10

[environment]
memory_mb = 256
"""


def main(root: Path, n: int) -> None:
    """Write n tasks, the same ones every time."""
    draw = random.Random(0)
    for number in range(n):
        a, b = draw.randrange(11, 100), draw.randrange(11, 100)
        folder = root / f"product-{number:03}"
        for name, text in {
            "task.toml": TASK,
            "instruction.md": INSTRUCTION.format(a=a, b=b),
            "tests/test.sh": TEST.format(product=a * b),
        }.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64)
