"""A run in processes of its own that a test attacks: what it says, what it has done, and who of it still lives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: A variable that all processes of a run inherit.
MARK = "SLIME_TEST_ATTACK"
#: Seconds in which a run that was killed has left nothing, and in which a signal is answered on a busy machine.
GONE_S, TOLD_S = 30.0, 5.0


class Attacked:
    """A command under attack.

    Args:
        command: command line.
        environment: variables to add to this process's.
        errors: file that its messages go to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self._errors, self._mark = errors, secrets.token_hex(8)
        own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=own | environment | {MARK: self._mark},
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )
        self._seen = {self.process.pid: _processes()[self.process.pid].began}

    @property
    def told(self) -> str:
        """What it said so far."""
        return self._errors.read_text(errors="replace")

    def wait_for(self, fact: Callable[[], bool], seconds: float = 400) -> None:
        """Wait until something is so, while it runs."""
        deadline = time.monotonic() + seconds
        while not fact():
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            self.living()
            time.sleep(0.05)  # it needs the cores

    def send(self, number: signal.Signals, *, to_group: bool = False) -> float:
        """Send a signal, to the whole group as a terminal does; returns the seconds until it was answered."""
        self.living()
        before, began = self.told.count(f"{number.name}: "), time.monotonic()
        (os.killpg if to_group else os.kill)(self.process.pid, number)
        while self.told.count(f"{number.name}: ") == before:
            assert time.monotonic() - began < 60, self.told
            time.sleep(0.005)
        seconds = time.monotonic() - began
        time.sleep(0.3)  # a signal that comes twice within 0.2 s is one
        return seconds

    def kill(self) -> float:
        """Kill it, and wait until nothing of it is left; returns how many seconds that took."""
        self.living()
        self.process.kill()
        self.process.wait()
        return self.wait_until_nothing_is_left()

    def finish(self, seconds: float = 400) -> int:
        """Wait until it has ended by itself, and nothing of it is left; returns its exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.told
            self.living()
            time.sleep(0.05)
        self.wait_until_nothing_is_left()
        return self.process.returncode

    def wait_until_nothing_is_left(self) -> float:
        """Wait until none of its processes runs; returns how many seconds that took."""
        began = time.monotonic()
        while found := self.living():
            assert time.monotonic() - began < GONE_S, found
            time.sleep(0.05)
        return time.monotonic() - began

    def living(self) -> dict[int, str]:
        """Return its processes by id: those below one that was seen before, and those that have its mark."""
        there = _processes()
        wanted = f"{MARK}={self._mark}".encode()
        found = {pid for pid in there if wanted in _read(pid, "environ").split(b"\0")}
        found |= {pid for pid, began in self._seen.items() if pid in there and there[pid].began == began}
        while below := {pid for pid, process in there.items() if process.parent in found} - found:
            found |= below
        self._seen |= {pid: there[pid].began for pid in found}
        return {pid: title_of(pid) for pid in found if there[pid].runs}

    def find(self, title: str) -> list[int]:
        """Return its processes whose command line has a text in it, the oldest first."""
        return sorted((pid for pid, own in self.living().items() if title in own), key=self._seen.__getitem__)

    def end(self) -> None:
        """Kill whatever is left of it, for the tests that follow."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def writers_below(folder: Path) -> list[tuple[int, str]]:
    """The processes whose output goes to a file below a folder, with their command lines: ranks and servers have logs in that of
    their run."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        pid = int(output.parts[2])
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            found += [(pid, title_of(pid))] if output.readlink().is_relative_to(folder) else []
    return found


class Traces:
    """What processes had that may outlive them: ports that they listened at, and files in shared memory."""

    def __init__(self) -> None:
        self._sockets, self._files = set[str](), set[str]()

    def take(self, pids: Iterable[int]) -> None:
        """Take down what some processes have."""
        for pid in pids:
            for opened in Path(f"/proc/{pid}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    target = str(opened.readlink())
                    self._sockets |= {target[8:-1]} if target.startswith("socket:[") else set()
            mapped = _read(pid, "maps").decode(errors="replace")
            self._files |= set(re.findall(r"(/dev/shm/.+?)(?: \(deleted\))?$", mapped, re.M))

    def left(self) -> list[str]:
        """Return what of it is still there: sockets by number, as the kernel gives none twice, and files."""
        listening = [
            fields[9]
            for table in ("tcp", "tcp6")
            for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
            if fields[3] == "0A"
        ]
        assert self._sockets, "nothing was taken down"
        return [f"port of socket {one}" for one in listening if one in self._sockets] + [
            file for file in sorted(self._files) if os.path.exists(file)
        ]


class _Process:
    """What /proc says of a process."""

    def __init__(self, stat: str) -> None:
        fields = stat.rpartition(")")[2].split()
        self.runs, self.parent, self.began = fields[0] not in "ZX", int(fields[1]), int(fields[19])


def _processes() -> dict[int, _Process]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(folder.name)] = _Process((folder / "stat").read_text(errors="replace"))
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile, or is another user's
        return b""


def title_of(pid: int) -> str:
    """Return the command line of a process; empty where there is none."""
    return " ".join(_read(pid, "cmdline").decode(errors="replace").replace("\0", " ").split())


def _hear_interrupts() -> None:
    """Hear SIGINT also where the tests are a background job of a shell, which has its commands ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Runs:
    """Starts one command again and again, the way `test_*_attacks.py` attack it.

    Args:
        command: of a run.
        folder: the run's.
        root: of the repository.
    """

    def __init__(self, command: Sequence[str], folder: Path, root: Path) -> None:
        self.folder, self._command, self._starts = folder, list(command), 0
        self._path = os.pathsep.join([str(root / "tests/plugins"), str(root / "packages/slime-core/tests")])

    @contextlib.contextmanager
    def attacked(self, *flags: str, halt: str = "") -> Iterator[Attacked]:
        """Start it, wait until it halts at a place (`slow_parts.halts`), and end whatever the block leaves."""
        self._starts += 1
        halted = self.folder.parent / f"halted-{self._starts}"
        path = os.pathsep.join([self._path, os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "HALT": halt, "HALTED": str(halted)}
        errors = self.folder.parent / f"errors-{self._starts}.txt"
        errors.parent.mkdir(parents=True, exist_ok=True)
        run = Attacked([*self._command, *flags], environment, errors)
        try:
            if halt:
                run.wait_for(halted.exists)
            yield run
        finally:
            run.end()

    @property
    def summary(self) -> dict[str, Any]:
        """What the run says of itself at its end."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def log(self) -> str:
        """What it logged."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def check_interrupted(self, status: int, number: signal.Signals, steps: int) -> None:
        """Check that a signal ended it after so many steps, and that a checkpoint is of them."""
        assert status == 128 + number
        assert (self.summary["status"], self.summary["steps"]) == ("interrupted", steps)
        self.check_saved(steps)

    def check_saved(self, steps: int) -> None:
        """Check that the newest checkpoint is of so many steps, and that none is half written."""
        names = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        assert names[-1:] == [f"step_{steps:06d}"]
        assert not [name for name in names if name.startswith(".")]
