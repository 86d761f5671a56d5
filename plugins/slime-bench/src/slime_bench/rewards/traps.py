"""Samples that hang, crash or take memory when they are unpickled. Imports next to nothing: each worker that is caught imports it."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

KINDS = ("hang", "memory", "crash")
MARK = "86399.25"
"""Seconds that the processes sleep which a hanging response leaves behind; by it they are found."""


@dataclass(frozen=True)
class Trap:
    """Springs when a worker unpickles the sample that holds it, so that any reward can be measured."""

    kind: str

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Spring instead of being copied."""
        return spring, (self.kind,)


def spring(kind: str) -> NoReturn:
    """Hang beside an orphan, ask for a terabyte, or crash the interpreter."""
    if kind == "hang":
        subprocess.Popen(["sleep", MARK], start_new_session=True)
        time.sleep(float(MARK))
    elif kind == "memory":
        bytearray(1 << 40)
    faulthandler.disable()  # a hundred tracebacks would bury the table
    os.abort()
