"""`AtExit`: a shell command that runs when this process ends, even if it is killed."""

from __future__ import annotations

import os
import subprocess

#: Waits for the end of standard input, which comes when the process at the other end of the pipe ends, however it does.
_WAIT = "read -r line; "
#: The same where the argument is the first line.
_WAIT_FOR_ARGUMENT = 'IFS= read -r argument && { read -r line; exec /bin/sh -c "$0" "$argument"; }'


class AtExit:
    """A shell command that runs in a separate process when this process ends.

    Args:
        command: gets the argument as `$0`.
        argument: of it; without one `tell` gives it, and the command does not run before.
    """

    def __init__(self, command: str, argument: str | None = None) -> None:
        words = [_WAIT_FOR_ARGUMENT, command] if argument is None else [_WAIT + command, argument]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the group of this process are this one's
        )

    def tell(self, argument: str) -> None:
        """Give the argument, a line at most; a child of this process may do so before it becomes another program."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), argument.encode() + b"\n")

    def cancel(self) -> None:
        """Cancel the command. May be called twice."""
        with self._process:
            self._process.kill()
