"""The id that a program gave a run, in the run's folder, so that a resumed run goes on under it."""

from __future__ import annotations

from slime_core.rundir.rundir import RunDir


def remembered_id(run_dir: RunDir, name: str) -> str | None:
    """Return the id that the file `name` of the run's folder holds; None where there is none yet."""
    file = run_dir.path / name
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def remember_id(run_dir: RunDir, name: str, found: str) -> None:
    """Write an id to the file `name` of the run's folder."""
    run_dir.write_text(name, found + "\n")
