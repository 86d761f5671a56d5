"""Tracker `plot`: a picture of the reward, drawn from `metrics.jsonl` when the run ends."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.build import BuildContext
from slime_core.rundir import RunDir

if TYPE_CHECKING:
    from slime_core.run import Run

logger = logging.getLogger(__name__)
#: Width of the trailing mean, in steps.
SMOOTH = 5


class PlotTracker:
    """Draws `reward.png` into the run's folder."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def run_start(self, run: Run) -> None:
        """Say early that the picture cannot be drawn."""
        if importlib.util.find_spec("matplotlib") is None:
            logger.warning(
                "tracker plot: matplotlib is not installed; install slime-core[plot] for reward.png"
            )

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        """Nothing to do."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing to do: the rows are read from `metrics.jsonl`, so that a resumed run is drawn whole."""

    def run_end(self, summary: Mapping[str, Any]) -> None:
        """Draw, when there is anything to be seen."""
        rows = self._run_dir.read_metrics()
        if rows and importlib.util.find_spec("matplotlib") is not None:
            draw(rows, self._run_dir.path / "reward.png", title=str(summary["run_name"]))


def create_tracker(build: BuildContext) -> PlotTracker:
    """Return the tracker for this run's folder."""
    return PlotTracker(RunDir(build.run_dir))


def draw(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw mean training reward and held-out accuracy over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rewards = [(row["step"], row["rollout/raw_reward"]) for row in rows if "rollout/raw_reward" in row]
    if rewards:
        steps = [step for step, _ in rewards]
        values = [value for _, value in rewards]
        means = [
            sum(values[max(0, i - SMOOTH + 1) : i + 1]) / len(values[max(0, i - SMOOTH + 1) : i + 1])
            for i in range(len(values))
        ]
        axes.plot(steps, values, ".", color="#9bb7d4", label="training reward, each step")
        axes.plot(steps, means, color="#1f5a93", label=f"training reward, mean of {SMOOTH} steps")
    for name in sorted({key for row in rows for key in row if key.endswith("-pass@1")}):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(
            *zip(*points, strict=True), "o-", color="#c4552d", label=f"held-out accuracy ({name[5:-7]})"
        )
    axes.set(xlabel="step", ylabel="reward", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
