"""`HarborTask`: a task folder, read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError


@dataclass(frozen=True)
class HarborTask:
    """`task.toml`, `instruction.md`, `environment/` and `tests/test.sh` of one folder.

    Source: Harbor's task format (harborframework.com/docs/tasks), schema 1.
    """

    folder: Path
    instruction: str
    """What the policy is asked."""
    verifier_timeout_s: float
    """Deadline of the tests, seconds."""
    memory_bytes: int
    """Memory of the container."""
    env: Mapping[str, str]
    """Environment variables of the tests."""

    @property
    def tests(self) -> Path:
        """The folder that appears as `/tests` when the policy has finished."""
        return self.folder / "tests"

    @property
    def environment(self) -> Path:
        """The folder that the container is built from."""
        return self.folder / "environment"


def read_task(folder: Path) -> HarborTask:
    """Return the task of a folder.

    Raises:
        DataError: a part is missing, or not what Harbor's format says; names it.
    """
    config = _config(folder / "task.toml")
    verifier, environment = _table(config, "verifier", folder), _table(config, "environment", folder)
    if config.get("steps"):
        raise DataError(f"{folder}/task.toml: has steps; wanted a task of one step")
    instruction, tests = folder / "instruction.md", folder / "tests" / "test.sh"
    for path in (instruction, tests):
        if not path.is_file():
            raise DataError(f"{path}: is missing; wanted a task folder of Harbor")
    text = instruction.read_text(encoding="utf-8").strip()
    if not text:
        raise DataError(f"{instruction}: is empty; wanted what the policy is to do")
    env = verifier.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise DataError(f"{folder}/task.toml: verifier.env is {env!r}; wanted names and text")
    return HarborTask(
        folder=folder,
        instruction=text,
        verifier_timeout_s=_number(verifier, "timeout_sec", 600.0, folder),
        memory_bytes=int(_number(environment, "memory_mb", 2048, folder) * 2**20),
        env=env,
    )


def task_folders(root: Path) -> Iterator[Path]:
    """Yield the folders below a path that have a `task.toml`, in order of their names; the path itself if it has one."""
    found = sorted(path.parent for path in root.rglob("task.toml"))
    if not found:
        raise DataError(f"{root}: no folder below has a task.toml; wanted task folders of Harbor")
    yield from found


def _config(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); wanted a task folder of Harbor") from error


def _table(config: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise DataError(f"{folder}/task.toml: {name} is {found!r}; wanted a table")
    return found


def _number(table: Mapping[str, Any], name: str, default: float, folder: Path) -> float:
    found = table.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise DataError(f"{folder}/task.toml: {name} is {found!r}; wanted a number above 0")
    return float(found)
