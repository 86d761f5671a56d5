"""Kinds of tools: HTTP services, MCP servers and the sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web
from slime_agents.formats.calls import ToolCall
from slime_agents.tools.code import code
from slime_agents.tools.http import http
from slime_agents.tools.mcp import mcp
from slime_agents.tools.tool import ToolLimits, answer
from slime_core.errors import PluginError

SERVER = str(Path(__file__).with_name("mcp_server.py"))
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def answered(toolset, *calls):
    """Return the names of a toolset's tools, and the text that each call is answered by."""

    async def play():
        try:
            tools = {tool.schema["name"]: tool for tool in await toolset.open()}
            texts = [(await answer(tools[call.name], call)).text for call in calls]
            return sorted(tools), texts
        finally:
            await toolset.close()

    return asyncio.run(play())


def test_an_http_tool_posts_arguments_and_gives_the_body_of_the_answer():
    async def serve(request):
        body = await request.json()
        if body["query"] == "fail":
            return web.Response(status=500, text="out of order")
        if body["query"] == "hang":
            await asyncio.sleep(30)
        return web.Response(text=f"{request.headers['X-Key']}: {body['query']}" + "!" * 500)

    async def play():
        app = web.Application()
        app.router.add_post("/search", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/search"
        texts = []
        for query, timeout_s in (("日本", 30), ("fail", 30), ("hang", 0.5)):
            limits = ToolLimits(timeout_s=timeout_s, max_chars=20)
            toolset = http("search", limits, url=url, parameters=QUERY, headers={"X-Key": "k"})
            (tool,) = await toolset.open()
            texts.append((await answer(tool, ToolCall("search", {"query": query}))).text)
            await toolset.close()
        await runner.cleanup()
        gone = http("search", ToolLimits(max_chars=20), url=url, parameters=QUERY)
        (tool,) = await gone.open()
        texts.append((await answer(tool, ToolCall("search", {"query": "x"}))).text)
        await gone.close()
        return texts

    found, failed, hung, gone = asyncio.run(play())
    assert found.startswith("k: 日本!!!")
    assert "[cut: 20 of" in found
    assert failed.startswith("error: search: Runti")
    assert hung == "error: search gave no answer within 0.5 s"
    assert gone.startswith("error: search: Clien")


def test_more_calls_of_an_http_tool_than_aiohttps_own_bound_are_in_flight_at_once():
    n_calls, arrived = 120, []

    async def play():
        all_there = asyncio.Event()

        async def serve(request):
            arrived.append(1)
            if len(arrived) == n_calls:
                all_there.set()
            await all_there.wait()
            return web.Response(text="y")

        app = web.Application()
        app.router.add_post("/", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        toolset = http("search", ToolLimits(timeout_s=20), url=url, parameters=QUERY)
        (tool,) = await toolset.open()
        call = ToolCall("search", {"query": "x"})
        answers = await asyncio.gather(*(answer(tool, call) for _ in range(n_calls)))
        await toolset.close()
        await runner.cleanup()
        return answers

    assert [one.text for one in asyncio.run(play())] == ["y"] * n_calls


def test_a_call_of_an_http_tool_has_no_deadline_beside_that_of_its_limits():
    async def play():
        toolset = http("search", ToolLimits(timeout_s=1000), url="http://127.0.0.1:9", parameters=QUERY)
        await toolset.open()
        await toolset.close()
        return toolset._session.timeout.total

    assert asyncio.run(play()) is None


@pytest.mark.slow
def test_the_tools_of_an_mcp_server_are_called_and_the_server_ends_with_them():
    toolset = mcp("server", ToolLimits(timeout_s=60), command=[sys.executable, SERVER])
    names, texts = answered(
        toolset, ToolCall("add", {"a": 2, "b": 40}), ToolCall("fail", {}), ToolCall("add", {"a": "x", "b": 1})
    )
    assert names == ["add", "fail", "pid"]
    assert texts[0] == "42"
    assert texts[1].startswith("error: fail: ")
    assert texts[2] == "error: add: arguments.a: 'x' is not of type 'integer'"


@pytest.mark.slow
def test_an_mcp_server_that_lacks_a_tool_or_does_not_start_is_refused_by_name():
    lacking = mcp("server", ToolLimits(), command=[sys.executable, SERVER], only=["divide"])
    with pytest.raises(
        PluginError, match=r"'server' has no tools \['divide'\]; it has \['add', 'fail', 'pid'\]"
    ):
        answered(lacking)
    with pytest.raises(PluginError, match="the MCP server 'gone'"):
        answered(mcp("gone", ToolLimits(), command=["/no/such/program"]))
    with pytest.raises(PluginError, match="neither; wanted command or url"):
        mcp("server", ToolLimits())


async def kill(tools):
    """Kill the server of tools."""
    os.kill(int((await answer(tools["pid"], ToolCall("pid", {}))).text), signal.SIGKILL)


@pytest.mark.slow
def test_an_mcp_server_that_is_killed_is_started_again_once_and_this_is_logged(caplog):
    toolset = mcp("server", ToolLimits(timeout_s=60), command=[sys.executable, SERVER])
    call = ToolCall("add", {"a": 2, "b": 40})

    async def play():
        try:
            tools = {tool.schema["name"]: tool for tool in await toolset.open()}
            texts = []
            for _ in range(2):
                await kill(tools)
                lost = await asyncio.gather(*(answer(tools["add"], call) for _ in range(5)))
                texts.append({one.text for one in lost})
                texts.append((await answer(tools["add"], call)).text)
            return texts
        finally:
            await toolset.close()

    texts = asyncio.run(play())
    lost = "error: add: RuntimeError: the MCP server 'server' was lost before it answered; it is there again"
    assert texts == [{lost}, "42", {lost}, "42"]
    assert caplog.text.count("the MCP server 'server' is lost") == 2


@pytest.mark.slow
def test_an_mcp_server_that_cannot_be_started_again_ends_the_run_by_name(tmp_path):
    script = shutil.copy(SERVER, tmp_path / "server.py")
    toolset = mcp("server", ToolLimits(timeout_s=60), command=[sys.executable, str(script)])
    call = ToolCall("add", {"a": 2, "b": 40})

    async def play():
        try:
            tools = {tool.schema["name"]: tool for tool in await toolset.open()}
            script.unlink()
            await kill(tools)
            for _ in range(2):
                with pytest.raises(
                    PluginError, match="the MCP server 'server' was lost, and is not to be had"
                ):
                    await answer(tools["add"], call)
        finally:
            await toolset.close()

    asyncio.run(play())


def test_programs_run_in_the_sandbox_with_what_they_print_and_how_they_end():
    toolset = code("python", ToolLimits(timeout_s=20))
    programs = [
        "print(6 * 7)",
        "raise ValueError('no')",
        "import socket; socket.create_connection(('1.1.1.1', 80))",
    ]
    _, texts = answered(toolset, *(ToolCall("python", {"code": program}) for program in programs))
    assert texts[0] == "42"
    assert "ValueError: no" in texts[1]
    assert "ended by exit 1" in texts[1]
    assert "Error" in texts[2]
    _, (stopped,) = answered(
        code("python", ToolLimits(timeout_s=2)), ToolCall("python", {"code": "while True: pass"})
    )
    assert stopped == "stopped after 2 s"
