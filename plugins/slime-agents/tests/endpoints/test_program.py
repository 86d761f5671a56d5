"""What an agent program finds in its environment."""

from __future__ import annotations

import asyncio
import http.server
import threading

import pytest
from slime_agents.endpoints.program import PYTHON, run_program

ASKS = """
import os, urllib.request
print(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], timeout=10).status)
print(urllib.request.getproxies()["http"], os.environ["NO_PROXY"])
"""


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
        return await run_program([PYTHON, "-c", ASKS], address, "key", {}, timeout_s=60, over=asyncio.Event())

    outcome = asyncio.run(main())
    assert (outcome.status, outcome.output.split()) == (0, ["200", "http://127.0.0.1:9", expected])
