"""`pytest --until`, by which CI bounds its time."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

FILE = "packages/slime-core/tests/plugins/test_bind.py"


@pytest.mark.parametrize(("seconds", "became"), [(-1, "skipped"), (3600, "passed")])
def test_what_would_begin_later_is_skipped_and_its_file_is_named(root, seconds, became):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--until",
        str(time.time() + seconds),
        FILE,
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = done.stdout.splitlines()[-1]
    assert became in counts
    assert ({"passed", "skipped"} - {became}).pop() not in counts
    assert (f"no time was left for {FILE}" in done.stdout) is (became == "skipped")
