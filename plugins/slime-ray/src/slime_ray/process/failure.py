"""What went wrong in another process: `Failure`, an error that it returns to the driver, and Ray's own report of one that it killed."""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import dataclass

from ray.exceptions import OutOfMemoryError, RayError
from slime_core.errors import TrainerError


class RankTraceback(Exception):
    """Stands as the cause of an error that a rank raised; shows where in the rank's program it was raised."""

    def __str__(self) -> str:
        """Return the traceback, set off from the driver's own."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """What a rank answers in the place of a result."""

    pickled: bytes | None
    """The error; None where it does not survive pickling."""
    text: str
    """Its class and message."""
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Take an error down, while it is being handled."""
        text = traceback.format_exception_only(error)[0].strip()
        pickled: bytes | None = None
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # a class of a user's own may do anything
            pickled = None
        return cls(pickled, text, "".join(traceback.format_exception(error)))

    def error(self, rank: str) -> Exception:
        """Return the error, with a note that names the rank and the rank's traceback as its cause.

        It is a TrainerError with the same text where the error cannot be had here.
        """
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # its class is not installed here, say
                error = None
        if error is None:
            error = TrainerError(self.text)
        error.add_note(f"raised on {rank}")
        error.__cause__ = RankTraceback(self.traceback)
        return error


def killed_for_memory(error: RayError) -> str | None:
    """Return that Ray killed a process because its machine ran out of memory, in a sentence; None where it did not.

    Ray's own report has a hundred lines.
    """
    reason = re.search(r"^OOM kill reason: (.+)$", str(error), re.M)
    if reason is None and not isinstance(error, OutOfMemoryError):
        return None
    told = reason[1] if reason else str(error).partition("\n")[0]
    return f"Ray killed it, as its machine ran out of memory: {told}"
