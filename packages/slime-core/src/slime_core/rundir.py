"""`RunDir`: the folder of a run, and nothing in it is a pickle."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, Problem
from slime_core.hold import LOCK, Hold
from slime_core.sample import Group

#: Warnings from one place in the code that the terminal shows.
_SHOWN = 3


@dataclass(frozen=True)
class RunDir:
    """Paths and files of one run."""

    path: Path
    _hold: Hold = field(default_factory=Hold, compare=False, repr=False)

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, `step_NNNNNN` each."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def config(self) -> Path:
        """The resolved settings, as a recipe."""
        return self.path / "config.toml"

    def rank_log(self, number: int) -> Path:
        """What a rank of the trainer printed, where it is a process of its own."""
        return self.path / "ranks" / f"rank_{number:03d}.log"

    def rollout_file(self, step: int, *, evaluation: bool = False) -> Path:
        """Every sample of a step, one JSON object a line."""
        return self.path / "rollouts" / f"{'eval_' if evaluation else ''}step_{step:06d}.jsonl"

    def take(self, *, anew: bool) -> None:
        """Keep the folder to this process until `release`; with `anew` nothing is left of an earlier run.

        Raises:
            ConfigError: another process has it; or something is in it that is to be deleted, and no run.
        """
        found = sorted(self.path.iterdir(), key=self.config.__eq__) if anew and self.path.exists() else []
        found = [path for path in found if path.name != LOCK]
        if found and not self.config.exists():
            raise ConfigError(
                [
                    Problem(
                        "run.overwrite",
                        f"{self.path}, which has no {self.config.name}",
                        "the folder of a run",
                        "delete it yourself, or give another --run-name",
                    )
                ]
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold.take(self.path)
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def release(self) -> None:
        """Let other processes have the folder; may be called twice."""
        self._hold.release()

    def create(self) -> None:
        """Make the folder, or what an earlier run of the name left out."""
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole or not at all."""
        write_atomic(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        self.write_text(name, json.dumps(value, indent=2, default=float) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return what `summary.json` says; empty when there is none."""
        try:
            summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return summary

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's line to `metrics.jsonl`."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; a torn last line is left out."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the process died while writing this line
        return rows

    def rewind(self, step: int) -> None:
        """Drop what was written about steps after `step`: they are about to run again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        if self.metrics.exists():
            write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        for file in (self.path / "rollouts").glob("*step_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) > step:
                file.unlink()

    def write_samples(self, step: int, groups: Iterable[Group], *, evaluation: bool = False) -> None:
        """Write every sample of a step, without the engine's routes and nuclei, which may be hundreds of numbers a token."""
        left_out = ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
        without: dict[str, Any] = dict.fromkeys(left_out)
        samples = (sample.to_dict() | without for group in groups for sample in group)
        lines = [json.dumps(sample, default=_plain) + "\n" for sample in samples]
        write_atomic(self.rollout_file(step, evaluation=evaluation), "".join(lines))


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


#: `extra` of a record that the terminal shows otherwise, such as the error that ends the run.
FILE_ALONE = {"file_alone": True}


class _RunLog(logging.FileHandler):
    """Writes everything to a file, and of each kind of warning the first few to the terminal as well."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._shown: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; its traceback goes to the file alone."""
        super().emit(record)
        place = (record.pathname, record.lineno)
        is_shown = record.levelno >= logging.WARNING and not getattr(record, "file_alone", False)
        if is_shown and self._shown[place] < _SHOWN:
            self._shown[place] += 1
            more = f" (more like it: {self.baseFilename})" if self._shown[place] == _SHOWN else ""
            print(f"{record.levelname.lower()}: {record.getMessage()}{more}", file=sys.stderr)


def log_to_file(run_dir: RunDir) -> logging.Handler:
    """Send every module's log to `log.txt`, and warnings to the terminal too; the caller removes the handler in the end."""
    handler = _RunLog(run_dir.path / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler


def _plain(value: Any) -> Any:
    """Turn what JSON lacks (numpy arrays and scalars, bytes) into plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)
