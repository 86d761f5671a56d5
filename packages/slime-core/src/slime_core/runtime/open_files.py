"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

#: What a run has open at most: connections to its servers, one for each request in flight, and its files.
_MOST = 65536


def allow_open_files() -> None:
    """Have this process, and those that it starts, open as many files as its hard limit allows, up to 65,536.

    The soft limit that a process begins with is often 1,024, less than a run has requests in flight.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit below its hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
