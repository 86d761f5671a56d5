"""`TaskBox`: where a task's commands run; and `SubprocessBox`, slime's sandbox for code."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slime_core.runtime.daemon_thread import DaemonThread
from slime_rm.code.sandbox.running import Limits, Ran, run

from slime_agents.environments.harbor.dockerfile import ContainerFiles, layout_of
from slime_agents.environments.harbor.task import HarborTask


@dataclass(frozen=True)
class Said:
    """What a command did."""

    output: str
    """Standard output and standard error, as they came."""
    code: int | None
    """Exit status; None where it was stopped."""
    stopped: str = ""
    """Why it was stopped: `time`, `memory` or `output`."""


class TaskBox(Protocol):
    """The container of one task, for one conversation. A box with Docker, or on another machine, is one more of these."""

    async def run(self, command: str, *, timeout_s: float) -> Said:
        """Run a shell command in the task's working folder; what it writes stays for the next one, unless it is stopped."""

    async def verify(self, *, timeout_s: float) -> tuple[Said, Mapping[str, str]]:
        """Run the task's tests; returns what they said, and the text of each file that they left in `/logs/verifier`."""

    async def close(self) -> None:
        """Remove the container."""


#: Runs inside, fed an order: unpack the folders, run the command, answer with its output and the folders.
_DRIVER = """\
import base64, io, json, os, subprocess, sys, tarfile
order = json.load(sys.stdin)
for archive in order["archives"]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        tar.extractall("/box", filter="fully_trusted")
for folder in order["made"]:
    os.makedirs("/box" + folder, exist_ok=True)
with open("/box/output", "w+b") as output:
    code = subprocess.run(["/bin/bash", "-c", order["command"]], cwd=order["workdir"], env=order["env"],
                          stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
    output.seek(0)
    said = output.read(order["most"]).decode(errors="replace")
logs, kept = {}, io.BytesIO()
for path in order["read"] and [os.path.join(order["read"], name) for name in os.listdir(order["read"])]:
    if os.path.isfile(path):
        with open(path, errors="replace") as text:
            logs[os.path.basename(path)] = text.read(100000)
with tarfile.open(fileobj=kept, mode="w") as tar:
    for folder in order["kept"]:
        tar.add("/box" + folder, arcname=folder.lstrip("/"))
print(json.dumps({"output": said, "code": code, "logs": logs, "tree": base64.b64encode(kept.getvalue()).decode()}))
"""
_TESTS, _LOGS, _VERIFIER, _TMP = "/tests", "/logs", "/logs/verifier", "/tmp"


class SubprocessBox:
    """Runs each command in slime_rm's sandbox for code: no network, no file of this machine but its programs, limited memory.

    Between commands the working folder and `/tmp` are kept as an archive, which nothing outside unpacks; processes are not
    kept. What the task's Dockerfile says is done as far as it needs no image: see `dockerfile.layout_of`.

    Args:
        task: the task.
        disk_bytes: files of the working folder, all together.
        output_bytes: most output of a command that is read.

    Raises:
        DataError: the task needs Docker.
    """

    def __init__(self, task: HarborTask, *, disk_bytes: int = 1 << 24, output_bytes: int = 1 << 16) -> None:
        self._task, self._disk, self._output = task, disk_bytes, output_bytes
        self._layout: ContainerFiles = layout_of(task.environment)
        self._tree = base64.b64encode(self._layout.archive()).decode()
        tops = {"/" + target.strip("/").split("/")[0] for _, target in self._layout.files}
        work = "/" + self._layout.workdir.strip("/").split("/")[0]
        self._kept = sorted({*tops, work, _TMP} - {_LOGS, _TESTS})

    async def run(self, command: str, *, timeout_s: float) -> Said:
        """Run a command; one that is stopped leaves nothing behind."""
        said, tree, _ = await self._ask(command, timeout_s=timeout_s)
        if tree is not None:
            self._tree = tree
        return said

    async def verify(self, *, timeout_s: float) -> tuple[Said, Mapping[str, str]]:
        """Run `/tests/test.sh` with a fresh `/logs`."""
        said, _, logs = await self._ask(
            f"bash {_TESTS}/test.sh",
            timeout_s=timeout_s,
            archives=[_packed(self._task.tests)],
            env=self._task.env,
            read=_VERIFIER,
        )
        return said, logs

    async def close(self) -> None:
        """Nothing to do: no process outlives its command."""

    async def _ask(
        self,
        command: str,
        *,
        timeout_s: float,
        archives: list[str] | None = None,
        env: Mapping[str, str] | None = None,
        read: str = "",
    ) -> tuple[Said, str | None, Mapping[str, str]]:
        order = {
            "archives": [self._tree, *(archives or [])],
            "made": [self._layout.workdir, _VERIFIER, _TMP],
            "command": command,
            "workdir": self._layout.workdir,
            "env": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": _TMP,
                "PWD": self._layout.workdir,
                "LANG": "C.UTF-8",
                **self._layout.env,
                **(env or {}),
            },
            "most": self._output,
            "read": read,
            "kept": self._kept,
        }
        limits = Limits(
            wall_s=timeout_s,
            cpu_s=max(1, round(timeout_s)),
            memory_bytes=self._task.memory_bytes,
            processes=64,
            output_bytes=2 * self._disk + 8 * self._output,
            disk_bytes=2 * self._disk,
        )
        folders = sorted({*self._kept, _TESTS, _LOGS})
        # Of its own: asyncio's few threads are shared, and waiting for one of them would count against the deadline of the turn.
        thread = DaemonThread("sandbox")
        running = thread.submit(
            run, {"driver.py": _DRIVER}, "driver.py", stdin=json.dumps(order), limits=limits, folders=folders
        )
        thread.shutdown(wait=False)
        return _read(await asyncio.wrap_future(running))


def _read(ran: Ran) -> tuple[Said, str | None, Mapping[str, str]]:
    """Return what the driver answered, or why it did not."""
    if ran.ending != "exit" or ran.code != 0:
        stopped = ran.ending if ran.ending in ("time", "memory", "output") else "disk"
        return Said("", None, stopped), None, {}
    answer = json.loads(ran.stdout)
    return Said(answer["output"], answer["code"]), answer["tree"], answer["logs"]


def _packed(folder: Path) -> str:
    """Return a folder's files as an archive of `/tests`."""
    layout = ContainerFiles(
        files=[
            (path, f"{_TESTS}/{path.relative_to(folder).as_posix()}")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
    )
    return base64.b64encode(layout.archive()).decode()
