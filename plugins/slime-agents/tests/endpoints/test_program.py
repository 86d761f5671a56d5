"""What an agent program finds in its environment."""

from __future__ import annotations

import asyncio
import http.server
import os
import secrets
import select
import threading
import time

import pytest
from slime_agents.endpoints.program import PYTHON, run_program
from slime_core.errors import PluginError
from slime_core.samples import Status

from .running import played

ASKS = """
import os, urllib.request
print(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], timeout=10).status)
print(urllib.request.getproxies()["http"], os.environ["NO_PROXY"])
"""


def key():
    """Of a session of its own: what has another one's is killed with that."""
    return secrets.token_urlsafe(32)


@pytest.fixture
def address():
    """Of a server on loopback."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("theirs", "expected"), [("", "127.0.0.1"), ("a.b,.c", "a.b,.c,127.0.0.1"), ("*", "*")]
)
def test_a_program_asks_the_endpoint_itself_and_others_by_the_users_proxy(
    monkeypatch, address, theirs, expected
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", theirs)

    async def main():
        return await run_program([PYTHON, "-c", ASKS], address, key(), {}, timeout_s=60, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert (outcome.status, outcome.output.split()) == (0, ["200", "http://127.0.0.1:9", expected])


#: `SLIME_TASK={"x": "` and `"}` and the NUL are 21 bytes of the 131,072 that Linux gives one variable.
@pytest.mark.parametrize(("length", "is_there"), [(131_051, True), (131_052, False), (200_000, False)])
def test_a_task_too_long_for_a_variable_is_on_standard_input_alone(monkeypatch, length, is_there):
    monkeypatch.setenv("SLIME_TASK", "of another")
    program = (
        "import json, os, sys; given = sys.stdin.read(); "
        "print(len(json.loads(given)['x']), os.environ.get('SLIME_TASK') == given, 'SLIME_TASK' in os.environ)"
    )

    async def main():
        task = {"x": "y" * length}
        return await run_program([PYTHON, "-c", program], "", key(), task, timeout_s=60, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert outcome.output.split() == [str(length), str(is_there), str(is_there)]


def ends_within(seconds, pid):
    """Return whether a process that is none of ours ends in time: one that was killed still needs a core for that."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor) as of_process:
        return bool(select.select([of_process], [], [], seconds)[0])


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (3, 0.0)])
def test_a_program_has_ended_when_its_own_process_has_and_what_it_left_running_is_killed(status, reward):
    script = f"sleep 300 & echo $!; exit {status}"

    async def main():
        return await run_program(["sh", "-c", script], "", key(), {}, timeout_s=20, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert (outcome.ended_by, outcome.status, outcome.reward) == ("exit", status, reward)
    assert ends_within(30, int(outcome.output))


@pytest.mark.parametrize("output", ["", " >&- 2>&-"], ids=["its output open", "its output closed"])
def test_what_a_program_left_running_in_a_session_of_its_own_is_killed(output):
    script = f"setsid sleep 300{output} & echo $!; exit 0"

    async def main():
        return await run_program(["sh", "-c", script], "", key(), {}, timeout_s=20, over=asyncio.Event())

    begin = time.monotonic()
    outcome = asyncio.run(main())
    assert (outcome.ended_by, outcome.status) == ("exit", 0)
    assert ends_within(30, int(outcome.output))
    assert time.monotonic() - begin < 20


def test_what_a_program_started_is_killed_with_it_though_it_left_the_session_and_threw_its_environment_away():
    script = "setsid env -i sleep 300 & echo $!; wait"

    async def main():
        return await run_program(["sh", "-c", script], "", key(), {}, timeout_s=1, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert (outcome.ended_by, outcome.reward) == ("timeout", 0.0)
    assert ends_within(30, int(outcome.output))


def test_another_sessions_processes_go_on(tmp_path):
    os.mkfifo(tmp_path / "started")
    script = f"setsid sleep 300 & echo $! > {tmp_path}/started; wait"

    async def main():
        over = asyncio.Event()
        theirs = run_program(["sh", "-c", script], "", key(), {}, timeout_s=60, over=over)
        going = asyncio.create_task(theirs)
        number = int(await asyncio.to_thread((tmp_path / "started").read_text))
        await run_program(["true"], "", key(), {}, timeout_s=20, over=asyncio.Event())
        os.kill(number, 0)
        over.set()
        return number, await going

    number, outcome = asyncio.run(main())
    assert outcome.ended_by == "stopped"
    assert ends_within(30, number)


def test_a_program_that_closes_its_output_has_not_ended():
    script = "exec >&- 2>&-; sleep 0.3; exit 5"

    async def main():
        return await run_program(["sh", "-c", script], "", key(), {}, timeout_s=20, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert (outcome.ended_by, outcome.status) == ("exit", 5)


def test_all_that_a_program_wrote_before_its_exit_is_kept():
    script = "head -c 200000 /dev/zero | tr '\\0' 'x'; echo end"

    async def main():
        return await run_program(["sh", "-c", script], "", key(), {}, timeout_s=20, over=asyncio.Event())

    assert asyncio.run(main()).output == "x" * 1996 + "end\n"


def test_a_command_that_is_no_program_ends_the_run_and_one_that_the_system_refuses_fails_its_sample():
    with pytest.raises(PluginError, match=r"agents\.program: /no/such/program cannot be run"):
        played(None, lambda text: "y", program=["/no/such/program"])
    samples, _ = played(None, lambda text: "y", program=["true", "x" * 200_000], reward="program")
    assert samples[0].status is Status.FAILED
    assert "agents.program: true cannot be run: Argument list too long" in samples[0].failure
