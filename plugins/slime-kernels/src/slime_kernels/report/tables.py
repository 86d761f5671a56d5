"""The report in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from slime_kernels.report.figures import FAST, Figures, TurnFigures, by_level, by_steps, by_turn
from slime_kernels.report.outcomes import TrajectoryOutcome

_NONE = "-"


def show(console: Console, outcomes: Sequence[TrajectoryOutcome]) -> None:
    """Print the tables: training by steps, levels and turns, evaluations by steps and levels."""
    for evaluation, what in ((False, "training"), (True, "evaluation")):
        found = [one for one in outcomes if one.evaluation == evaluation]
        if not found:
            continue
        console.print(_figures(f"{what}, by step", "step", by_steps(found)))
        console.print(_figures(f"{what}, by level", "level", by_level(found)))
        if max(len(one.turns) for one in found) > 1:
            console.print(_turns(f"{what}, by turn", by_turn(found)))
            ended = Counter(str(one.ended_by) for one in found)
            console.print("ended by: " + ", ".join(f"{why} {n}" for why, n in ended.most_common()))


def _figures(title: str, first: str, rows: Mapping[Any, Figures]) -> Table:
    fast = [f"fast_{p:g}" for p in FAST]
    table = _table(title, first, "kernels", "compiled", "correct", *fast, "speedup", "turns", "return")
    for name, one in rows.items():
        table.add_row(
            str(name),
            str(one.n),
            f"{one.compiled:.1%}",
            f"{one.correct:.1%}",
            *(f"{one.fast[p]:.1%}" for p in FAST),
            _NONE if one.speedup is None else f"{one.speedup:.2f}",
            f"{one.turns:.2f}",
            f"{one.value:.3f}",
        )
    return table


def _turns(title: str, rows: Sequence[TurnFigures]) -> Table:
    table = _table(title, "turn", "attempts", "compiled", "correct", "reward", "better than before")
    for one in rows:
        table.add_row(
            str(one.turn + 1),
            str(one.n),
            f"{one.compiled:.1%}",
            f"{one.correct:.1%}",
            f"{one.reward:.3f}",
            _NONE if one.improved is None else f"{one.improved:.1%}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
