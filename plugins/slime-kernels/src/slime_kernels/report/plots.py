"""The report as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_kernels.report.figures import by_steps, by_turn, fast_p
from slime_kernels.report.outcomes import TrajectoryOutcome

_COLOURS = {"compiled": "#8a8a8a", "correct": "#1f5a93", "fast_1": "#3d8c58", "fast_2": "#c4552d"}
#: Speedups at which the curve of fast_p is drawn, and the points of the curves over steps.
_SPEEDUPS, _MOST_POINTS = [step / 20 for step in range(81)], 60


def draw(outcomes: Sequence[TrajectoryOutcome], path: Path, *, title: str) -> None:
    """Draw rates over steps, fast_p as a curve of p, and where there are several turns the rates of each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trained = [one for one in outcomes if not one.evaluation]
    evaluated = [one for one in outcomes if one.evaluation]
    panels: list[tuple[Any, Sequence[TrajectoryOutcome], str]] = [
        (_rates, found, what) for found, what in ((trained, "training"), (evaluated, "evaluation")) if found
    ]
    panels += [(_speedups, found, what) for _, found, what in panels]
    panels += [
        (_turns, found, what)
        for draws, found, what in panels
        if draws is _rates and max(len(one.turns) for one in found) > 1
    ]
    columns = 2 if trained and evaluated else 1
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.0 * columns, 0.5 + 3.0 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (draws, found, what) in zip(grid, panels, strict=False):
        draws(axes, found)
        axes.set_title(what, fontsize="medium")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(-0.03, 1.03)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


def _rates(axes: Any, outcomes: Sequence[TrajectoryOutcome]) -> None:
    rows = by_steps(outcomes, most=_MOST_POINTS)
    steps = [int(name.partition("-")[0]) for name in rows]
    series = {
        "compiled": [one.compiled for one in rows.values()],
        "correct": [one.correct for one in rows.values()],
        "fast_1": [one.fast[1.0] for one in rows.values()],
        "fast_2": [one.fast[2.0] for one in rows.values()],
    }
    for width, (name, values) in zip((5.0, 3.5, 2.0, 1.0), series.items(), strict=True):
        axes.plot(
            steps, values, "o-", color=_COLOURS[name], linewidth=width, markersize=width + 1, label=name
        )
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step")
    axes.set_ylabel("share of kernels")


def _speedups(axes: Any, outcomes: Sequence[TrajectoryOutcome]) -> None:
    steps = sorted({one.step for one in outcomes})
    quarter = max(1, len(steps) // 4)
    for part, colour in ((steps[:quarter], "#9bb7d4"), (steps[-quarter:], "#1f5a93")):
        found = [one for one in outcomes if one.step in part]
        name = f"step {part[0]}" if len(part) == 1 else f"steps {part[0]} to {part[-1]}"
        axes.plot(_SPEEDUPS, [fast_p(found, p) for p in _SPEEDUPS], color=colour, label=name)
        if len(steps) == 1:
            break
    axes.set_xlabel("p")
    axes.set_ylabel("fast_p")


def _turns(axes: Any, outcomes: Sequence[TrajectoryOutcome]) -> None:
    rows = by_turn(outcomes)
    for number, name in enumerate(("compiled", "correct", "improved")):
        values = [getattr(one, name) or 0.0 for one in rows]
        at = [one.turn + 1 + 0.27 * (number - 1) for one in rows]
        colour = _COLOURS.get(name, "#b08d1e")
        axes.bar(
            at, values, width=0.25, color=colour, label=name if name != "improved" else "better than before"
        )
    axes.set_xticks([one.turn + 1 for one in rows])
    axes.set_xlabel("turn")
    axes.set_ylabel("share of attempts")
