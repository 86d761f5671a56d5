"""`RunDir`: the folder of a run. Its files are text, read strictly; what trainers save in `checkpoints/` is theirs."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AllowInfNan, BaseModel, ConfigDict

from slime_core.errors import ConfigError, Problem
from slime_core.files.lock import LOCK, FolderLock
from slime_core.files.strict_read import Counted, Unreadable, checked, json_object, read_file, toml_tables
from slime_core.rundir.records import RecordWriter, atomic_file, records_of
from slime_core.samples import Group
from slime_core.samples.reused_memory import ReusedMemory

#: Warnings from one place in the code that the terminal shows.
_SHOWN = 3
#: What each line of `metrics.jsonl` begins with.
_BEGIN = b'{"step": '
#: Files of samples; others in their folder are left alone.
_ROLLOUT = re.compile(r"(?:eval_|dropped_)?step_([0-9]{1,18})\.(?:jsonl|npz)")
#: What is in the folder of a run, and of which kind.
_KINDS: tuple[tuple[str, Callable[[Path], bool], str], ...] = (
    *(
        (name, Path.is_file, "file")
        for name in ("config.toml", "summary.json", "metrics.jsonl", "events.jsonl", "log.txt")
    ),
    *((name, Path.is_file, "file") for name in ("plugins.lock.json", "reward.png")),
    *((name, Path.is_dir, "folder") for name in ("rollouts", "checkpoints")),
)

_Finite = Annotated[float, AllowInfNan(False)]


class _Summary(BaseModel):
    """What must be in `summary.json`."""

    model_config = ConfigDict(strict=True)
    status: str
    steps: Counted
    eval_before: _Finite | None
    eval_after: _Finite | None
    wall_s: Annotated[_Finite, Ge(0)]


class _Row(BaseModel):
    """What must be in a line of `metrics.jsonl`; all else is numbers."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float | str | bool | None]
    step: Counted


@dataclass(frozen=True)
class RunDir:
    """Paths and files of one run."""

    path: Path
    _lock: FolderLock = field(default_factory=FolderLock, compare=False, repr=False)
    _records: RecordWriter = field(default_factory=RecordWriter, compare=False, repr=False)
    _memory: ReusedMemory = field(default_factory=ReusedMemory, compare=False, repr=False)
    """Of the columns of records."""

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, `step_NNNNNN` each."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What the run did and when, one JSON object a line; see `rundir.events`."""
        return self.path / "events.jsonl"

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
        """Every sample of a step, one JSON object a line; its columns of tokens are in the `.npz` beside it (`records`)."""
        return self.path / "rollouts" / f"{'eval_' if evaluation else ''}step_{step:06d}.jsonl"

    def dropped_file(self, step: int) -> Path:
        """Every sample of the groups that a step dropped, one JSON object a line, with the reason as `dropped`."""
        return self.path / "rollouts" / f"dropped_step_{step:06d}.jsonl"

    def take(self, *, anew: bool) -> None:
        """Lock the folder until `release`; with `anew`, delete an earlier run first.

        Raises:
            ConfigError: another process has it; or something is in it that is to be deleted, and no run; or it cannot be
                made, written to, or emptied.
        """
        with self._written():
            self._take(anew=anew)

    def _take(self, *, anew: bool) -> None:
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
        self._lock.take(self.path)
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def release(self) -> None:
        """Unlock the folder. May be called twice."""
        self._records.close()
        self._lock.release()

    def create(self) -> None:
        """Create the folder and its subfolders if they do not exist.

        Raises:
            ConfigError: it cannot be written to.
        """
        with self._written():
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.write_text(".probe", "")  # a folder that is there may be one that nothing can be added to
            (self.path / ".probe").unlink()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Say of an error of the file system which folder is needed instead."""
        try:
            yield
        except OSError as error:
            self.release()
            found, wanted = error.strerror or str(error), "a folder that can be made and written to"
            todo = "give another --run-name or --output-dir"
            raise ConfigError([Problem(str(self.path), found, wanted, todo)]) from error

    def write_text(self, name: str, text: str) -> None:
        """Write a small file whole or not at all."""
        write_atomic(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        self.write_text(name, json.dumps(value, indent=2, default=float) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return what `summary.json` says; empty when there is none.

        Raises:
            ConfigError: it is not what a run writes.
        """
        with _of_run(self.summary, "remove it, and how the run ended is forgotten"):
            try:
                summary = json_object(read_file(self.summary))
            except FileNotFoundError:
                return {}
            checked(_Summary, summary)
            return summary

    def read_config(self) -> dict[str, dict[str, Any]]:
        """Return the tables of `config.toml`; empty when there is none.

        Raises:
            ConfigError: it is not what a run writes.
        """
        with _of_run(
            self.config, "bring it back from a copy, or remove it: the run goes on with the settings given"
        ):
            try:
                return toml_tables(read_file(self.config))
            except FileNotFoundError:
                return {}

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's line to `metrics.jsonl`."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; a last line that a crash has cut is left out.

        Raises:
            ConfigError: another line is not what a run writes; names it.
        """
        rows: list[dict[str, Any]] = []
        with _of_run(self.metrics, "mend that line, or delete it"):
            try:
                *lines, last = read_file(self.metrics).split(b"\n")
            except FileNotFoundError:
                return []
            for number, line in enumerate(lines, start=1):
                try:
                    rows.append(_row(line))
                except Unreadable as error:
                    raise Unreadable(f"in line {number} {error}") from None
            try:
                rows.append(_row(last))  # only its line feed is missing
            except Unreadable:
                if not _is_cut(last):
                    raise
        return rows

    def metrics_of_steps(self) -> dict[int, dict[str, Any]]:
        """Return the metrics of each step; raises as `read_metrics`.

        A run that ends earlier than it was to has a second line of its last step, with the evaluation: both are one here.
        """
        merged: dict[int, dict[str, Any]] = {}
        for row in self.read_metrics():
            merged.setdefault(row["step"], {}).update(row)
        return merged

    def rewind(self, step: int, *, logs_it: bool = False) -> None:
        """Delete what was written about steps after `step`, which run again.

        At 0 nothing is kept: the evaluation before the first step is run again, too.

        Args:
            step: the last one that is done.
            logs_it: whether its metrics are still to be written: a process that ended before it had saved may have done so.
        """
        kept = [row for row in self.read_metrics() if row["step"] <= step - logs_it] if step > 0 else []
        if self.metrics.exists():
            write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        for file in (self.path / "rollouts").iterdir():
            found = _ROLLOUT.fullmatch(file.name)
            if found is not None and (int(found[1]) > step or step == 0):
                file.unlink()

    def problems(self) -> list[Problem]:
        """Return problems of an earlier run in this folder that prevent resuming it."""
        found: list[Problem] = []
        for name, is_kind, kind in _KINDS:
            if (self.path / name).exists() and not is_kind(self.path / name):
                found.append(Problem(str(self.path / name), f"no {kind}", f"a {kind}", "remove it"))
        if found:
            return found
        for read in (self.read_config, self.read_summary, self.read_metrics):
            try:
                read()
            except ConfigError as error:
                found += error.problems
        for file in self.path.glob("rollouts/*"):
            if _ROLLOUT.fullmatch(file.name) and not file.is_file():
                found.append(Problem(str(file), "no file", "the samples of a step", "remove it"))
        return found

    def rollout_files(self, kind: str = "") -> dict[int, Path]:
        """Return the recorded samples by step, in their order; `kind` is `eval_` for evaluations, `dropped_` for dropped groups."""
        prefix = f"{kind}step_"
        found = {file.stem.removeprefix(prefix): file for file in self.path.glob(f"rollouts/{prefix}*.jsonl")}
        return dict(sorted((int(step), file) for step, file in found.items() if step.isdecimal()))

    def write_samples(self, step: int, groups: Iterable[Group], *, evaluation: bool = False) -> None:
        """Record every sample of a step as it is now. A thread writes the file; see `flush`.

        Raises:
            OSError: an earlier file could not be written.
        """
        samples = [sample for group in groups for sample in group]
        records = records_of(samples, memory=self._memory)
        self._records.write(self.rollout_file(step, evaluation=evaluation), records)

    def write_dropped(self, step: int, dropped: Iterable[tuple[Group, str]]) -> None:
        """Record every sample of the groups that a step dropped, each with the reason; no file where none was.

        Raises:
            OSError: an earlier file could not be written.
        """
        told = [(sample, reason) for group, reason in dropped for sample in group]
        if told:
            samples, reasons = zip(*told, strict=True)
            self._records.write(self.dropped_file(step), records_of(samples, reasons, memory=self._memory))

    def flush(self) -> None:
        """Wait until all samples are in their files.

        Raises:
            OSError: a file could not be written.
        """
        self._records.flush()


@contextlib.contextmanager
def _of_run(path: Path, todo: str) -> Iterator[None]:
    """Refuse a file of the folder that is not what a run writes."""
    try:
        yield
    except Unreadable as error:
        raise ConfigError([Problem(str(path), str(error), "what a run writes", todo)]) from None


def _is_cut(line: bytes) -> bool:
    """Return whether a line is what a crash leaves of a row: its begin, or zeros where the file system had room for it."""
    return line.startswith(_BEGIN) or _BEGIN.startswith(line) or not line.strip(b"\0")


def _row(line: bytes) -> dict[str, Any]:
    row = json_object(line, with_nan=True)
    checked(_Row, row)
    return row


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with atomic_file(path) as file:
        file.write(text.encode())


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
