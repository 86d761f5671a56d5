"""The garbage collector of a process that runs: what stays to the end is not looked at, all samples of a step seldom."""

from __future__ import annotations

import gc

#: Collections of younger objects between two of all: Python's own, and of a run, whose steps then have one at most.
_USUAL, _SELDOM = 10, 1000


def spare_the_collector() -> None:
    """Collect, and keep collections from what is there now: modules and parts stay to the end of the run.

    Nor do they look at all samples of a step each time that there are a quarter more of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _SELDOM)


def collect_as_usual() -> None:
    """Undo it, for what the process does after the run. Does nothing where a run had not begun: what a caller froze stays so."""
    if gc.get_threshold()[2] == _SELDOM:
        gc.unfreeze()
        gc.set_threshold(*gc.get_threshold()[:2], _USUAL)
