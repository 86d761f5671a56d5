"""What counts as the time of a session outside of the engine, by a clock that the test puts forward."""

from __future__ import annotations

import asyncio

from ..byte_chat import SayingEngine
from .running import run_agent
from .test_attacks import post


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    ahead_s = 0.0

    def time(self):
        return super().time() + self.ahead_s


class TakesTwenty(SayingEngine):
    """Answers once two requests are there, which are 20 s at it together."""

    def __init__(self):
        super().__init__(lambda text: "y")
        self.n, self.both = 0, asyncio.Event()

    async def generate(self, tokens, params, **more):
        self.n += 1
        if self.n == 2:
            asyncio.get_running_loop().ahead_s += 20.0
            self.both.set()
        await self.both.wait()
        return await super().generate(tokens, params, **more)


def test_the_time_of_turns_side_by_side_at_the_engine_is_none_of_the_programs():
    async def agent(base_url, api_key, task):
        asked = [{"messages": [{"role": "user", "content": text}]} for text in ("left", "right")]
        await asyncio.gather(*(post(base_url, api_key, body=body) for body in asked))
        asyncio.get_running_loop().ahead_s += 5.0
        return 1.0

    with asyncio.Runner(loop_factory=Clock) as runner:
        ((first, second),), _ = runner.run(run_agent(agent, None, engine=TakesTwenty(), reward="program"))
    # 25 s in all, and what the machine takes.
    assert 5.0 <= first.non_generation_time < 20.0
    assert second.non_generation_time == first.non_generation_time
