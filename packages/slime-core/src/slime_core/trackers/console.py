"""Tracker `console`: live progress while a step runs, and one line for each step that is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slime_core.build import BuildContext

if TYPE_CHECKING:
    from slime_core.run import Run

#: What a step's line shows: (metric, label, format).
COLUMNS = (
    ("rollout/raw_reward", "reward", "{:.3f}"),
    ("rollout/response_len/mean", "len", "{:.1f}"),
    ("train/loss", "loss", "{:+.4f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("train/train_rollout_logprob_abs_diff", "lp diff", "{:.1e}"),
    ("perf/rollout_time", "rollout", "{:.1f}s"),
    ("perf/train_time", "train", "{:.1f}s"),
    ("perf/update_weights_time", "sync", "{:.1f}s"),
)


class ConsoleTracker:
    """Shows a bar over all steps with the time left, and a bar over the phase under way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._steps = self._progress.add_task("steps", total=None)
        self._phase = self._progress.add_task("start", total=None)
        self._num_steps = 0
        self._name = ""

    def run_start(self, run: Run) -> None:
        """Say what is about to happen, and start the bars."""
        self._num_steps = run.num_steps
        resumed = f", goes on with step {run.start_step}" if run.done_steps else ""
        self._console.print(
            f"run [bold]{run.run_dir.path}[/bold]: {run.num_steps} steps of {run.sizes.rollout_batch_size} prompts x "
            f"{run.sizes.n_samples_per_prompt} samples{resumed}",
            highlight=False,
        )
        self._progress.update(self._steps, total=run.num_steps, completed=run.done_steps)
        self._progress.start()

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        """Move the phase's bar."""
        if self._name != phase:
            self._name = phase
            self._progress.reset(self._phase, description=phase, total=total)
        self._progress.update(self._phase, completed=done, total=total)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        width = len(str(self._num_steps))
        shown = [f"{label} {form.format(metrics[key])}" for key, label, form in COLUMNS if key in metrics]
        shown += [
            f"[bold]{key[5:]} {value:.3f}[/bold]" for key, value in metrics.items() if key.endswith("-pass@1")
        ]
        head = "before" if step == 0 else f"step {step:>{width}}/{self._num_steps}"
        self._console.print(f"{head}  " + "  ".join(shown), highlight=False)
        self._progress.update(self._steps, completed=step)

    def run_end(self, summary: Mapping[str, Any]) -> None:
        """Stop the bars."""
        self._progress.stop()


def create_tracker(build: BuildContext) -> ConsoleTracker:
    """Return a tracker on standard output."""
    return ConsoleTracker(Console(soft_wrap=True))
