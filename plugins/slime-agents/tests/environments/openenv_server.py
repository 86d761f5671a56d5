"""A server of OpenEnv's protocol in this process: one guesses a number; more sessions than it has room for are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json

from aiohttp import WSMsgType, web


class Game:
    """The number is the seed; a guess has a field `message`."""

    def __init__(self):
        self.number, self.steps, self.episode = 0, 0, None

    def reset(self, data):
        self.number, self.steps, self.episode = data.get("seed", 7), 0, data.get("episode_id")
        return {"observation": {"text": "Guess.", "left": 3}, "reward": None, "done": False}

    def step(self, action):
        if set(action) != {"message"} or not str(action["message"]).lstrip("-").isdigit():
            return None
        self.steps += 1
        guess = int(action["message"])
        text = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return {"observation": {"text": text}, "reward": float(text == "right"), "done": text == "right"}


class Server:
    """What it was sent is in `told`, and how many sessions it has in `open`, at most `room`.

    It pings who has begun an episode, as uvicorn does from time to time; `ponged` is set once that is answered.
    """

    def __init__(self, *, room=2, shares=False):
        self.room, self.open, self.most, self.told = room, 0, 0, []
        self.shares, self.game = shares, Game()
        self.ponged = asyncio.Event()

    async def socket(self, request):
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        if self.open >= self.room:
            data = {"message": "full", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        game = Game()
        try:
            async for message in socket:
                if message.type is WSMsgType.PONG:
                    self.ponged.set()
                    continue
                if message.type is not WSMsgType.TEXT:
                    break
                asked = json.loads(message.data)
                self.told.append(asked)
                if asked["type"] == "close":
                    break
                if asked["type"] == "step" and asked["data"].get("message") == "13":
                    data = {"message": "bad luck", "code": "EXECUTION_ERROR"}
                    await socket.send_json({"type": "error", "data": data})
                    continue
                answer = game.reset(asked["data"]) if asked["type"] == "reset" else game.step(asked["data"])
                if answer is None:
                    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["no number"]}
                    await socket.send_json({"type": "error", "data": data})
                else:
                    await socket.send_json({"type": "observation", "data": answer})
                    if asked["type"] == "reset":
                        await socket.ping()
        finally:
            self.open -= 1
        return socket

    async def reset(self, request):
        return web.json_response(self.game.reset(await request.json()))

    async def step(self, request):
        answer = self.game.step((await request.json())["action"])
        if answer is None:
            return web.json_response({"detail": "no number"}, status=422)
        return web.json_response(answer)

    async def state(self, request):
        game = Game() if self.shares else self.game
        return web.json_response({"episode_id": game.episode, "step_count": game.steps})


@contextlib.asynccontextmanager
async def serving(server):
    """Yield the address at which it is served."""
    app = web.Application()
    app.router.add_get("/ws", server.socket)
    app.router.add_post("/reset", server.reset)
    app.router.add_post("/step", server.step)
    app.router.add_get("/state", server.state)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await asyncio.wait_for(runner.cleanup(), 10)
