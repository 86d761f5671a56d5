"""Files of a run folder that were cut, edited or replaced: one error that names the file, exit status 2, nothing written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.cli import main
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.rundir.rundir import RunDir

pytestmark = pytest.mark.timeout(300)

SHORT = ("--num-rollout", "6", "--eval-interval", "none")


@pytest.fixture
def run(letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run that was ended after 4 of 6 steps: checkpoints of steps 2 and 4."""
    registry = Registry()
    flags = [*SHORT, "--save-interval", "2", "--num-rollout", "4"]
    launch(load_settings([str(letters)], flags, registry=registry), registry, drive)
    folder = tmp_path / "runs/letters"
    assert [one.name for one in sorted((folder / "checkpoints").iterdir())] == ["step_000002", "step_000004"]
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "failed"}))
    capsys.readouterr()
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a folder but the log and who holds it."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.name not in ("log.txt", ".lock", "rollouts")
    }


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run(words) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert 0 < len(told.splitlines()) < 15
    assert len(told) < 2500
    assert "wanted" in told
    return told


def written(text: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


#: Whatever stands in the place of a file of any format.
ANY = {
    "empty": written(""),
    "zeros": written(bytes(300)),
    "not UTF-8": written(b"\xff\xfe{}"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 3]),
    "folder": as_folder,
    "deep": written("[" * 100_000),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}
JSON = ANY | {
    "list": written("[]"),
    "text": written('"a"'),
    "number": written("5" * 5000),
    "nothing in it": written("{}"),
    "deep object": written('{"steps": ' * 3000 + "1" + "}" * 3000),
}


def changed(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def lacking(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))

    return change


BAD = ("x", -1, 1.5, True, None, float("nan"), float("inf"), [], {}, 10**4000)
SUMMARY = JSON | {
    **{f"{key} {str(value)[:6]}": changed(key, value) for key in ("steps", "wall_s") for value in BAD if
       (key, value) != ("wall_s", 1.5)},
    **{f"no {key}": lacking(key) for key in ("status", "steps", "eval_before", "eval_after", "wall_s")},
    "status 1": changed("status", 1),
    "eval_after x": changed("eval_after", "x"),
    "twice": lambda path: path.write_text(path.read_text().replace("{", '{"steps": 1, "steps": 2,', 1)),
}  # fmt: skip


def line(number: int, text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True)
        lines[number] = f"{text}\n"
        path.write_text("".join(lines))

    return change


METRICS = {name: change for name, change in ANY.items() if name in ("not UTF-8", "folder", "pipe")} | {
    **{
        f"{what} in line {number + 1}": line(number, text)
        for number in (0, 2)
        for what, text in {
            "nothing": "",
            "half a row": '{"step": 1, "x"',
            "a list": "[1]",
            "no step": '{"x": 1}',
            "a step in words": '{"step": "1"}',
            "a step of NaN": '{"step": NaN}',
            "a step before the first": '{"step": -1}',
            "a huge step": f'{{"step": {"9" * 5000}}}',
            "a deep row": "[" * 100_000,
            "zeros": "\0" * 50,
            "a nested metric": '{"step": 1, "a": {"b": 1}}',
        }.items()
    },
}


def half_a_line(path: Path) -> None:
    """Leave half of a TOML file, which would be whole if it ended with a line."""
    text = path.read_text()
    path.write_text(text[: text.index("=", len(text) // 2) + 1])


CONFIG = {name: change for name, change in ANY.items() if name != "empty"} | {
    "half": half_a_line,
    "no table": written("rollout = 3\n"),
    "cut": written("[rollout\n"),
    "deep table": written("a = " + "[" * 3000),
    "huge number": written("[run]\nnum_rollout = " + "9" * 5000),
}
FOLDERS = {
    ".lock": as_folder,
    "rollouts": lambda path: (shutil.rmtree(path), path.touch()),
    "checkpoints": lambda path: (shutil.rmtree(path), path.touch()),
    "plugins.lock.json": as_folder,
    "rollouts/step_000001.jsonl": as_folder,
    "rollouts/step_000009.jsonl": lambda path: path.mkdir(),
}
MUTILATIONS = {
    **{f"summary.json: {name}": ("summary.json", change) for name, change in SUMMARY.items()},
    **{f"metrics.jsonl: {name}": ("metrics.jsonl", change) for name, change in METRICS.items()},
    **{f"config.toml: {name}": ("config.toml", change) for name, change in CONFIG.items()},
    **{name: (name, change) for name, change in FOLDERS.items()},
}


@contextlib.contextmanager
def restored(folder: Path) -> Iterator[None]:
    """Put the folder back as it was."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, symlinks=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        copy.rename(folder)


def test_every_mutilated_file_of_a_run_is_refused_by_name_and_nothing_is_written(letters, run, capsys):
    assert len(MUTILATIONS) > 60
    slow = random.Random(0).sample(sorted(MUTILATIONS), 12)
    for name, (file, change) in MUTILATIONS.items():
        with restored(run):
            change(run / file)
            if file == ".lock" or file == "checkpoints" or name in slow:
                before = contents(run)
                assert file in refused(["train", str(letters), *SHORT], capsys), name
                assert contents(run) == before, name
            else:
                problems = RunDir(run).problems()
                assert [problem.where for problem in problems] == [str(run / file)], name
                assert len(str(problems[0])) < 1000
    assert main.run(["train", str(letters), *SHORT]) == 0


def test_files_beside_the_samples_that_are_none_of_the_runs_change_nothing(letters, run, capsys):
    rollouts = run / "rollouts"
    odd = ("step_.jsonl", "step_x.jsonl", "step_-00001.jsonl", "step_1.jsonl", f"step_{'9' * 200}.jsonl", "notes.txt", "step_000001.bak", "\n")  # fmt: skip
    for name in odd:
        (rollouts / name).write_text("not a sample\n")
    (rollouts / "folder").mkdir()
    (rollouts / "nowhere").symlink_to("gone")
    assert main.run(["train", str(letters), *SHORT]) == 0
    assert main.run(["samples", str(run)]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert {name: (rollouts / name).read_text() for name in odd} == dict.fromkeys(odd, "not a sample\n")
    steps = {f"step_{step:06d}.jsonl" for step in range(1, 7)}
    assert {path.name for path in rollouts.iterdir()} >= steps | {"folder", "nowhere"}


def read_only(folder: Path) -> list[str]:
    """Return how to begin a command line that sees a folder as read-only."""
    there = shlex.quote(str(folder))
    mounted = f"mount --bind {there} {there} && mount -o remount,ro,bind {there}"
    unshared = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*unshared, mounted], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of one's own here")
    return [*unshared, f'{mounted} && exec "$@"', "sh"]


def test_a_run_folder_that_is_read_only_is_refused_by_name(letters, run):
    before = contents(run)
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *SHORT]
    ended = subprocess.run([*read_only(run), *command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"{run} may not be written to; wanted a folder that this process may write to" in ended.stderr
    assert contents(run) == before
