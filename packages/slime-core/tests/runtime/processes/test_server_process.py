"""A child process and its helpers: they go with the run, however that ends, and at once when they are told to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from slime_core.runtime.processes.server_process import ServerProcess

#: A server whose helper does not mind that it ends, and which deletes nothing.
SERVER = (
    "/bin/sh",
    "-c",
    'touch "$SLIME_SERVER_SCRATCH/file" "/dev/shm/test_${SLIME_SERVER_SCRATCH##*/}_1"; sleep 1000 & echo $$ $! && wait',
)


@pytest.fixture(autouse=True)
def scratch_and_shared_memory_go_too(monkeypatch, tmp_path):
    """The scratch folder of a server is deleted, and shared memory with its name, however the server ended."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = shared_memory()
    yield
    wait_for(lambda: not list(folder.iterdir()) and shared_memory() <= before)


def shared_memory():
    return set(Path("/dev/shm").glob("test_slime-server-*_1"))


OWNER = f"""
import asyncio, sys
from pathlib import Path
from slime_core.runtime.processes.server_process import ServerProcess

async def main():
    server = ServerProcess({SERVER!r}, environment={{}}, log=Path(sys.argv[1]))
    await server.start()
    await server.wait()

asyncio.run(main())
"""


def wait_for(fact):
    deadline = time.monotonic() + 30
    while not (found := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def pids(log):
    """The ids of server and helper, once they are there."""
    return [int(pid) for pid in log.read_text().split()] if log.exists() else []


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_and_its_helpers_go_with_a_run_that_is_killed(tmp_path, number):
    log = tmp_path / "server.log"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(log)]) as owner:
        server, helper = wait_for(lambda: pids(log))
        os.kill(helper, signal.SIGSTOP)
        os.kill(owner.pid, number)
    wait_for(lambda: has_ended(server) and has_ended(helper))


#: The same, killed as soon as the server has its helper, before `start` has gone on.
KILLED_AT_ONCE = f"""
import asyncio, os, signal, sys
from pathlib import Path
from slime_core.runtime.processes.server_process import ServerProcess

start = asyncio.create_subprocess_exec

async def start_and_be_killed(*command, **more):
    await start(*command, **more)
    while len(Path(sys.argv[1]).read_text().split()) < 2:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.create_subprocess_exec = start_and_be_killed
asyncio.run(ServerProcess({SERVER!r}, environment={{}}, log=Path(sys.argv[1])).start())
"""


def test_the_helpers_of_a_server_go_with_a_run_that_is_killed_as_it_starts(tmp_path):
    log = tmp_path / "server.log"
    with subprocess.Popen([sys.executable, "-c", KILLED_AT_ONCE, str(log)]) as owner:
        pass
    assert owner.returncode == -signal.SIGKILL
    assert len(pids(log)) == 2
    wait_for(lambda: all(has_ended(pid) for pid in pids(log)))


#: The same, but a `slime` command that ends: it kills all processes below itself, the guard of its server among them.
ENDS_ITSELF = f"""
import asyncio, sys
from pathlib import Path
from slime_core.runtime.processes.command_process import CommandProcess, adopt_orphans
from slime_core.runtime.processes.server_process import ServerProcess

async def main():
    server = ServerProcess({SERVER!r}, environment={{}}, log=Path(sys.argv[1]))
    await server.start()
    while len(Path(sys.argv[1]).read_text().split()) < 2:
        await asyncio.sleep(0.01)
    CommandProcess().end(3)

adopt_orphans()
asyncio.run(main())
"""


def test_a_server_goes_with_a_command_that_ends_without_stopping_it(tmp_path):
    log = tmp_path / "server.log"
    ended = subprocess.run([sys.executable, "-c", ENDS_ITSELF, str(log)])
    assert ended.returncode == 3
    assert len(pids(log)) == 2
    assert all(has_ended(pid) for pid in pids(log))


def test_nothing_is_left_of_a_server_that_cannot_be_started(tmp_path):
    async def main():
        before = children()
        with pytest.raises(FileNotFoundError):
            await ServerProcess(["/no/such/server"], environment={}, log=tmp_path / "log").start()
        return children() - before

    assert asyncio.run(main()) == set()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_nothing_of_a_server_that_is_ended_is_left(tmp_path, how):
    log = tmp_path / "server.log"

    async def main():
        before = children()
        server = ServerProcess(SERVER, environment={}, log=log)
        await server.start()
        while not pids(log):
            await asyncio.sleep(0.01)
        await getattr(server, how)()
        await getattr(server, how)()
        assert server.exit_status is not None
        return children() - before

    assert asyncio.run(main()) == set()
    assert [pid for pid in pids(log) if not has_ended(pid)] == []


#: Asks a server on loopback, which it has itself, as SGLang does in its warm-up.
ASKS_ITSELF = """
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
assert urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10).status == 200
"""


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_a_server_asks_others_of_the_run_past_the_proxy_of_the_environment(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    log = tmp_path / "server.log"

    async def main():
        server = ServerProcess([sys.executable, "-c", ASKS_ITSELF], environment={}, log=log)
        await server.start()
        status = await server.wait()
        await server.stop()
        return status

    assert asyncio.run(main()) == 0, log.read_text()


def test_the_end_of_a_long_log_is_told_without_reading_the_rest_and_once(tmp_path):
    log = tmp_path / "server.log"
    writes = f"truncate -s 100M {log}; printf 'the last words' >> {log}; exit 3"

    async def main():
        server = ServerProcess(["/bin/sh", "-c", writes], environment={}, log=log)
        await server.start()
        assert await server.wait() == 3
        tracemalloc.start()
        told, (_, peak_bytes) = server.failure, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await server.stop()
        log.unlink()
        assert server.failure == told  # as the second request that is lost with it asks
        return told, peak_bytes

    told, peak_bytes = asyncio.run(main())
    assert told.startswith(f"the server ended with status 3; its log is {log} and ends:\n")
    assert told.endswith("the last words")
    assert peak_bytes < 1_000_000


def children():
    return set(Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split())
