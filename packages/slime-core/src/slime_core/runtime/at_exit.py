"""`AtExit`: a shell command that runs when this process ends, even if it is killed."""

from __future__ import annotations

import subprocess

#: Waits for the end of standard input, which comes when the process at the other end of the pipe ends, however it does.
_WAIT = "read -r line; "


class AtExit:
    """A shell command that runs in a separate process when this process ends.

    Args:
        command: gets the argument as `$0`.
        argument: of it.
    """

    def __init__(self, command: str, argument: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT + command, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the group of this process are this one's
        )

    def cancel(self) -> None:
        """Cancel the command. May be called twice."""
        with self._process:
            self._process.kill()
