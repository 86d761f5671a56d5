"""Tracker `console`: live progress while a step runs, and one line for each step that is done."""

from __future__ import annotations

import shutil
import time
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

from slime_core.config.build import BuildContext
from slime_core.config.factories import trainer_factory
from slime_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    from slime_core.run.run import Run

#: What a step's line shows: (metric, label, format).
COLUMNS = (
    ("rollout/raw_reward", "reward", "{:.3f}"),
    ("rollout/response_len/mean", "len", "{:.1f}"),
    ("train/loss", "loss", "{:+.4f}"),
    ("train/entropy_loss", "entropy", "{:.3f}"),
    ("train/kl_loss", "kl", "{:.4f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("train/train_rollout_logprob_abs_diff", "log-prob diff", "{:.1e}"),
)
#: The parts of a step's time, in order: (metric, label). What saving takes is known when the step's metrics are out.
TIMES = (
    ("perf/rollout_time", "rollout"),
    ("perf/train_time", "train"),
    ("perf/update_weights_time", "sync"),
    ("perf/offload_time", "offload"),
    ("perf/eval_time", "eval"),
)
LEGEND = (
    "len: tokens of a response; grad: norm of the gradient; log-prob diff: between rollout and trainer, nats; "
    "every metric: docs/metrics.md"
)


class ConsoleTracker:
    """Shows a bar over all steps with the time left, a bar over the current phase, and a line per step.

    Args:
        console: to print on.
        checkpoint_bytes: estimate of a checkpoint's size; None where there is none.
    """

    def __init__(self, console: Console, *, checkpoint_bytes: int | None = None) -> None:
        self._console, self._checkpoint_bytes = console, checkpoint_bytes
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
        self._waiting: tuple[int, dict[str, float]] | None = None
        self._save_began = 0.0

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Say what is about to happen, and start the bars."""
        self._num_steps = run.num_steps
        resumed = f", goes on with step {run.start_step}" if run.done_steps else ""
        self._print(
            f"run [bold]{run.run_dir.path}[/bold]: {run.num_steps} steps of {run.sizes.rollout_batch_size} prompts x "
            f"{run.sizes.n_samples_per_prompt} samples{resumed}"
        )
        for line in self._about_checkpoints(run):
            self._print(line)
        self._print(LEGEND)
        self._progress.update(self._steps, total=run.num_steps, completed=run.done_steps)
        self._progress.start()

    @hookimpl
    def slime_progress(self, step: int, phase: str, done: int, total: int) -> None:
        """Move the phase's bar. A step's line waits for its checkpoint, and for nothing else."""
        if self._name != phase:
            self._name = phase
            self._progress.reset(self._phase, description=phase, total=total)
        self._progress.update(self._phase, completed=done, total=total)
        if phase != "save":
            self._print_step()
        elif done == 0:
            self._save_began = time.perf_counter()
        elif self._waiting is not None:
            self._waiting[1]["save"] = time.perf_counter() - self._save_began
            self._print_step()

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the step's metrics; its line is printed when it is known whether it is saved."""
        self._print_step()
        self._waiting = (step, dict(metrics))
        self._progress.update(self._steps, completed=step)

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """Stop the bars."""
        self._print_step()
        self._progress.stop()

    def _print_step(self) -> None:
        """Print the line of the step that waits for it, if there is one."""
        if self._waiting is None:
            return
        (step, metrics), self._waiting = self._waiting, None
        shown = [
            f"{label} {form.format(metrics[key])}"
            for key, label, form in COLUMNS
            if key in metrics and not _says_nothing(key, metrics)
        ]
        shown += [_times(metrics)]
        shown += [
            f"[bold]{key[5:]} {value:.3f}[/bold]" for key, value in metrics.items() if key.endswith("-pass@1")
        ]
        width = len(str(self._num_steps))
        head = "before" if step == 0 else f"step {step:>{width}}/{self._num_steps}"
        self._print("  ".join([head, *filter(None, shown)]))

    def _about_checkpoints(self, run: Run) -> list[str]:
        """Return what is to be known of checkpoints before the first is written."""
        section = run.settings.checkpoint
        if not section.due(run.num_steps, last=True) and section.save_interval is None:
            return ["checkpoints: none (--save-interval, --save-last)"]
        every = "" if section.save_interval is None else f"every {section.save_interval} steps and "
        size, free = self._checkpoint_bytes, shutil.disk_usage(run.run_dir.path).free
        each = "" if size is None else f", about {_bytes(size)} each (estimated)"
        lines = [
            f"checkpoints: {every}after the last step{each}; the newest {section.keep_checkpoints} are kept "
            f"(--save-interval, --keep-checkpoints); {_bytes(free)} are free"
        ]
        most = (section.keep_checkpoints + 1) * (size or 0)  # the new one is whole before the oldest goes
        if most > free:
            lines.append(
                f"[yellow]warning: up to {_bytes(most)} of checkpoints do not fit into {_bytes(free)}: make room, or "
                "lower --keep-checkpoints[/yellow]"
            )
        return lines

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _says_nothing(key: str, metrics: Mapping[str, float]) -> bool:
    """Say whether a value is 0 by construction: the loss of a policy gradient on its own samples, whose advantages cancel."""
    return key == "train/loss" and "train/pg_loss" in metrics and abs(metrics[key]) < 5e-5


def _times(metrics: Mapping[str, float]) -> str:
    """Return the whole time of a step and its parts, seconds; of an evaluation alone its own."""
    parts = [(label, metrics[key]) for key, label in TIMES if key in metrics]
    if "perf/step_time" not in metrics:
        return "".join(f"{seconds:.1f}s" for label, seconds in parts if label == "eval")
    if "save" in metrics:
        parts.append(("save", metrics["save"]))
    whole = metrics["perf/step_time"] + sum(seconds for label, seconds in parts if label in ("eval", "save"))
    parts.append(("other", whole - sum(seconds for _, seconds in parts)))
    shown = [f"{label} {seconds:.1f}" for label, seconds in parts if label != "other" or seconds >= 0.05]
    return f"{whole:.1f}s: {', '.join(shown)}"


def _bytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def create_tracker(build: BuildContext) -> ConsoleTracker:
    """Return a tracker on standard output."""
    factory = trainer_factory(build.settings.train, build.registry)
    return ConsoleTracker(Console(soft_wrap=True), checkpoint_bytes=factory.checkpoint_bytes(build))
