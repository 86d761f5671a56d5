"""`slime kernels report`: the figures and the picture of a run."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from slime_core.cli.arguments import no_run, wide_console
from slime_core.errors import ConfigError, DataError

from slime_kernels.report.outcomes import read_outcomes
from slime_kernels.report.plots import draw
from slime_kernels.report.tables import show


def report(run: Path, picture: Path | None) -> int:
    """Print what became of a run's kernels, and draw it; also while the run goes on.

    Args:
        run: its folder.
        picture: where the picture goes; `kernels.png` in the folder when not given.

    Raises:
        ConfigError: there is no such run; says which there are.
        DataError: no sample of it is a kernel.
    """
    if not os.path.isdir(run / "rollouts"):
        raise ConfigError([no_run("slime kernels report", run, lacks="rollouts")])
    outcomes = read_outcomes(run)
    if not outcomes:
        raise DataError(
            f"{run}: found no sample of a kernel problem; wanted a run with --data-source-path kernelbench or kernel-problems"
        )
    console = wide_console()
    show(console, outcomes)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed; install slime-core\\[plot]")
        return 0
    path = picture or run / "kernels.png"
    draw(outcomes, path, title=run.name)
    console.print(f"picture: {path}")
    return 0
