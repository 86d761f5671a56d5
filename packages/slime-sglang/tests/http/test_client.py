"""What the client makes of answers that a good server does not give, by a server of the test's own on loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from slime_core.errors import DeadlineError, EngineError
from slime_core.runtime.processes.ports import ReservedPort
from slime_sglang.http.client import ServerFaultError, SglangClient, _lines


def ask(
    answer: Callable,
    *,
    take: Callable | None = None,
    retries: int = 3,
    timeout_s: float = 60,
    key: str | None = None,
    is_read: bool = False,
):
    """Post to a server that answers the n-th request by `answer(n, request)`; return (answer or error, requests).

    With `take`, which gets the events, the answer is a stream; where it `is_read`, the request is a GET.
    """
    seen = []

    async def handle(request):
        seen.append(request.path)
        return await answer(len(seen), request)

    async def scenario():
        app = web.Application()
        app.router.add_route("*", "/generate", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        (address,) = runner.addresses
        client = SglangClient(f"http://127.0.0.1:{address[1]}", connections=2, retries=retries, key=key)
        try:
            if take is not None:
                return await client.stream("/generate", {}, take, timeout_s=timeout_s)
            if is_read:
                return await client.get("/generate", timeout_s=timeout_s, retries=retries)
            return await client.post("/generate", {}, timeout_s=timeout_s)
        except (EngineError, DeadlineError) as error:
            return error
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(scenario()), len(seen)


async def torn(number, request):
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"half":')
    request.transport.close()
    return response


async def slow(number, request):
    await asyncio.sleep(30)


def saying(status, text):
    async def answer(number, request):
        return web.Response(status=status, text=text)

    return answer


def test_a_server_that_is_not_ready_is_asked_again():
    async def answer(number, request):
        return web.Response(status=503) if number < 3 else web.json_response({"ok": number})

    assert ask(answer) == ({"ok": 3}, 3)


def test_a_server_that_never_gets_ready_is_an_error_after_all_retries():
    error, requests = ask(saying(503, "warming up"), retries=2)
    assert requests == 3
    assert "status 503: warming up" in str(error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (saying(400, "no such thing"), "status 400: no such thing"),
        (saying(500, "a traceback"), "status 500: a traceback"),
        (saying(200, "<html>"), "the answer is no JSON"),
        (torn, "ClientPayloadError"),
    ],
    ids=["refused", "broken", "nonsense", "torn"],
)
def test_what_was_taken_is_not_sent_again(answer, message):
    error, requests = ask(answer)
    assert isinstance(error, EngineError)
    assert message in str(error)
    assert requests == 1


def streaming(*pieces, cut=False):
    async def answer(number, request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if cut:
            request.transport.close()
        return response

    return answer


def test_events_arrive_in_order_however_they_are_cut_and_however_long_they_are():
    long = "x" * 2**20
    whole = (
        b'data: {"n": 1}\n\n: a comment\n\ndata:{"n": 2}\r\n\r\ndata: "%b"\n\ndata: [DONE]\n\n'
        % long.encode()
    )
    events = []
    pieces = [whole[start : start + 7] for start in range(0, 70, 7)] + [whole[70:]]
    assert ask(streaming(*pieces), take=events.append) == (None, 1)
    assert events == [{"n": 1}, {"n": 2}, long]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (streaming(b'data: {"n": 1}\n\n', b'data: {"n":', cut=True), "ClientPayloadError"),
        (streaming(b'data: {"n": 1}\n\n', b'data: {"n":'), "ended before its last event"),
        (streaming(b'data: {"n": 1}\n\n'), "ended before its last event"),
        (streaming(b'data: {"n": 1}\n\n', b"data: <html>\n\n"), "the answer is no JSON"),
    ],
    ids=["cut", "half an event", "no last event", "nonsense"],
)
def test_events_before_a_fault_have_arrived(answer, message):
    events = []
    error, requests = ask(answer, take=events.append)
    assert isinstance(error, ServerFaultError)
    assert message in str(error)
    assert (events, requests) == ([{"n": 1}], 1)


def test_what_arrived_before_a_cut_is_taken_also_where_nobody_waited_for_it_yet():
    """The reader is held up while events and the end of the connection come; aiohttp then raises first."""

    async def scenario():
        content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), 2**16)
        content.feed_data(b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: {"n"')
        content.set_exception(aiohttp.ClientPayloadError("cut"))
        lines = []
        with pytest.raises(aiohttp.ClientPayloadError):
            async for line in _lines(content):
                lines.append(line)
        return lines

    assert asyncio.run(scenario()) == [b'data: {"n": 1}', b"", b'data: {"n": 2}', b""]


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_the_key_says_what_it_wants(status):
    for key, found in ((None, "it was sent no key"), ("mine", "the key that it was sent is not its own")):
        error, requests = ask(saying(status, "no"), key=key)
        assert (type(error), requests) == (EngineError, 1)
        assert f"status {status}: {found}; wanted the one that it was started with" in str(error)
        assert "mine" not in str(error)


def test_a_key_is_sent_with_every_request():
    async def answer(number, request):
        return web.json_response(request.headers.get("Authorization"))

    assert ask(answer, key="mine") == ("Bearer mine", 1)
    assert ask(answer) == (None, 1)


def test_a_stream_is_asked_for_again_only_where_it_was_not_begun():
    async def answer(number, request):
        return await (saying(503, "busy") if number < 3 else streaming(b"data: [DONE]\n\n"))(number, request)

    assert ask(answer, take=lambda event: None) == (None, 3)
    error, requests = ask(saying(400, "no such thing"), take=lambda event: None)
    assert (type(error), requests) == (EngineError, 1)


def test_a_slow_answer_misses_its_deadline():
    error, requests = ask(slow, timeout_s=0.2)
    assert isinstance(error, DeadlineError)
    assert str(error).endswith("/generate: no answer after 0.2 s (--sglang-control-timeout-s)")
    assert requests == 1


def test_a_closed_port_is_an_error_after_all_retries():
    async def scenario():
        port = ReservedPort()  # where nobody else listens meanwhile
        client = SglangClient(f"http://127.0.0.1:{port.number}", connections=1, retries=1)
        try:
            await client.post("/generate", {}, timeout_s=60)
        finally:
            await client.close()
            port.release()

    with pytest.raises(EngineError, match="ClientConnectorError"):
        asyncio.run(scenario())


def asked(answer: Callable) -> tuple[object, int]:
    """GET from a server that answers the n-th request by `answer(n, request)`, within a second; return (answer or error, requests)."""
    return ask(answer, is_read=True, retries=0, timeout_s=1)


@pytest.mark.parametrize(
    ("n_held_up", "n_asked"), [(1, 2), (2, 2)], ids=["and answered", "and not a third time"]
)
def test_a_question_whose_deadline_passed_while_this_process_was_held_up_is_asked_once_more(
    n_held_up, n_asked
):
    """The server is on the event loop of the client, and holds that up for three deadlines before it answers."""

    async def answer(number, request):
        if number <= n_held_up:
            subprocess.run([sys.executable, "-c", "import threading; threading.Event().wait(3)"], check=True)
        return web.json_response({"ok": number})

    answered, requests = asked(answer)
    assert requests == n_asked
    assert answered == {"ok": 2} if n_held_up == 1 else isinstance(answered, DeadlineError)
