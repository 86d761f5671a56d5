"""The environment `openenv` against a server that OpenEnv itself runs, installed by uv into an environment of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from pathlib import Path

import pytest
from slime_agents.environments.openenv import OpenEnv
from slime_agents.environments.openenv_session import OpenEnvError
from slime_core.runtime.processes.ports import ReservedPort
from slime_core.samples import Sample

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of `guessing_openenv.py`, which has room for two sessions."""
    place = tmp_path_factory.mktemp("openenv") / "venv"
    python = place / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", "3.12", str(place)], check=True, cwd=HERE, timeout=120)
    install = ["uv", "pip", "install", "-q", "--python", str(python), "openenv==0.10.0"]
    subprocess.run(install, check=True, cwd=HERE, timeout=400)
    reserved = ReservedPort()
    port = reserved.number
    server = subprocess.Popen([str(python), str(HERE / "guessing_openenv.py"), str(port)])
    try:
        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
        reserved.release()


async def guessed(url, number, *, transport="socket"):
    """Return what the game says to a guess of 3 and to the right one, and the last reward."""
    environment = OpenEnv(url=url, observation_field="text", template="{observation}", transport=transport)
    own = Sample(index=number, metadata={"openenv": {"seed": number}})
    try:
        opening = await environment.reset(own)
        first, last = [await environment.step(own, guess) for guess in ("3", str(number))]
        return opening, first.content, last.content, last.done, last.reward
    finally:
        await environment.close()


@pytest.mark.slow
@pytest.mark.faults
def test_four_conversations_share_two_sessions_and_plain_http_is_found_out(url):
    async def main():
        return await asyncio.gather(*(guessed(url, number) for number in (1, 2, 4, 5)))

    lower, higher = ("Guess.\n", "lower", "right", True, 1.0), ("Guess.\n", "higher", "right", True, 1.0)
    assert asyncio.run(main()) == [lower, lower, higher, higher]
    with pytest.raises(OpenEnvError, match="a new one for each request"):
        asyncio.run(guessed(url, 1, transport="http"))
