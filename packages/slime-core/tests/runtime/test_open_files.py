"""The limit of open files of the process that has a run."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

#: Begins a run under a soft limit, which fails as it has no settings, and opens more files than that.
SCRIPT = """
import asyncio, contextlib, os, resource, sys
from slime_core.launch.local import assemble_and
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
with contextlib.suppress(AttributeError):
    asyncio.run(assemble_and(None, None, None))
held = [open(os.devnull) for _ in range(400)]
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("soft", [256, 2000])
def test_a_run_may_open_more_files_than_its_process_began_with(soft):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft)], capture_output=True, text=True, check=False
    )
    expected = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    assert done.stdout.split() == [str(expected), str(hard)], done.stderr
