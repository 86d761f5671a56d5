"""Tracker `plot`: a picture of reward and accuracy, drawn from `metrics.jsonl` when the run ends."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.rundir.rundir import RunDir

if TYPE_CHECKING:
    from slime_core.run.run import Run

logger = logging.getLogger(__name__)
#: A mean of so many steps, and a run of at least so many times as many: of a shorter one the mean would hide the course.
SMOOTH, LEAST = 5, 4
_COLOURS = ("#c4552d", "#3d8c58", "#8a5aa8", "#b08d1e", "#4a4a4a")

Points = list[tuple[int, float]]


class PlotTracker:
    """Draws `reward.png` into the run's folder."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Say early that the picture cannot be drawn."""
        if importlib.util.find_spec("matplotlib") is None:
            logger.warning(
                "tracker plot: matplotlib is not installed; install slime-core[plot] for reward.png"
            )

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """Draw, when there is anything to be seen."""
        rows = self._run_dir.read_metrics()
        if rows and importlib.util.find_spec("matplotlib") is not None:
            draw(rows, self._run_dir.path / "reward.png", title=str(summary["run_name"]))


def create_tracker(build: BuildContext) -> PlotTracker:
    """Return the tracker for this run's folder."""
    return PlotTracker(RunDir(build.run_dir))


def draw(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw training reward above and held-out accuracy below, over the same steps; a panel without numbers is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rewards = points(rows, "rollout/raw_reward")
    names = sorted({key for row in rows for key in row if key.endswith("-pass@1")})
    accuracies = {
        name[len("eval/") : -len("-pass@1")]: found for name in names if (found := points(rows, name))
    }
    n_panels = bool(rewards) + bool(accuracies)
    if not n_panels:
        return
    figure = Figure(figsize=(7.5, 1.2 + 2.6 * n_panels), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if rewards:
        _draw_rewards(panels[0], rewards)
    if accuracies:
        _draw_accuracies(panels[-1], accuracies)
    steps = [step for series in (rewards, *accuracies.values()) for step, _ in series]
    margin = max(0.5, 0.03 * (max(steps) - min(steps)))
    panels[-1].set_xlim(min(steps) - margin, max(steps) + margin)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize="small")
    figure.savefig(path)


def points(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return (step, value) of a metric, of a step that is there twice the last; what is no finite number is left out."""
    found = {row["step"]: row[name] for row in rows if name in row}
    return sorted((step, value) for step, value in found.items() if _is_finite(value))


def trailing_means(values: Sequence[float], width: int) -> list[float]:
    """Return of each value the mean of it and those before it, `width` at most."""
    last = (values[max(0, i - width + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in last]


def _draw_rewards(axes: Any, rewards: Points) -> None:
    steps, values = zip(*rewards, strict=True)
    is_long = len(values) >= LEAST * SMOOTH
    colour, alone = ("#9bb7d4", "") if is_long else ("#1f5a93", "-")
    axes.plot(steps, values, f"o{alone}", color=colour, markersize=4, label="each step")
    if is_long:
        axes.plot(steps, trailing_means(values, SMOOTH), color="#1f5a93", label=f"mean of {SMOOTH} steps")
    axes.set_ylabel("training reward")


def _draw_accuracies(axes: Any, accuracies: Mapping[str, Points]) -> None:
    for number, (name, found) in enumerate(accuracies.items()):
        steps, values = zip(*found, strict=True)
        axes.plot(steps, values, "o-", color=_COLOURS[number % len(_COLOURS)], markersize=5, label=name)
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(-0.03, 1.03)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
