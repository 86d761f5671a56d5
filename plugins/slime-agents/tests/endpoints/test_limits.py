"""The limit on turns of a session holds for requests side by side; a request that begins none takes none."""

from __future__ import annotations

import asyncio

import pytest
from slime_agents.endpoints.asking import Ask, Refused
from slime_agents.endpoints.session import Session, SessionLimits
from slime_agents.tape.tape import Tape
from slime_agents.tape.template import ChatTemplate
from slime_core.errors import EngineError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample

from ..byte_chat import ByteChat, last_of
from .test_attacks import HoldingEngine


class Saying(HoldingEngine):
    """Says so many letters as the last message says, and raises at `fail`; holds answers back until its gate is open."""

    def __init__(self):
        super().__init__()
        self.say = lambda text: _said(last_of(text, "user"))


def _said(asked):
    return EngineError("the server is gone") if asked == "fail" else "y" * int(asked)


def session_of(engine, *, max_turns=20, max_new_tokens=100, context=None):
    ctx = GenerateContext(engine=engine, tokenizer=ByteChat(), max_context_len=context)
    params, template = SamplingParams(max_new_tokens=max_new_tokens), ChatTemplate(ByteChat())
    tape = Tape(ctx, Sample(index=0, group_index=0, prompt="x"), params, template=template)
    return Session(id="a", tape=tape, limits=SessionLimits(max_turns=max_turns))


def asked(session, said, **more):
    ask = Ask(messages=[{"role": "user", "content": said}], **more)
    return asyncio.create_task(session.ask(ask, is_gone=lambda: False))


async def settled():
    """Let everything go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def lengths(found):
    """Return how many tokens each turn sampled, or why it was refused."""
    return [one.kind if isinstance(one, Refused) else one.n_sampled for one in found]


def test_eight_requests_at_once_have_the_one_turn_that_a_session_has():
    engine = Saying()

    async def main():
        session = session_of(engine, max_turns=1)
        asking = [asked(session, "9") for _ in range(8)]
        engine.gate.set()
        return session, await asyncio.gather(*asking, return_exceptions=True)

    session, found = asyncio.run(main())
    assert lengths(found) == [10] + ["max_turns"] * 7
    assert (len(session.tape.turns), session.hit) == (1, "max_turns")


def test_a_request_that_begins_no_turn_takes_none():
    engine = Saying()
    engine.gate.set()

    async def main():
        session = session_of(engine, max_turns=1)
        wrong = Ask(messages=[{"role": "assistant", "content": "me"}])
        with pytest.raises(Refused, match="the last message is the assistant's"):
            await session.ask(wrong, is_gone=lambda: False)
        return await asked(session, "9")

    assert asyncio.run(main()).n_sampled == 10


def test_a_turn_that_finds_no_token_left_takes_none():
    engine = Saying()
    engine.gate.set()

    async def main():
        session = session_of(engine, max_new_tokens=10, max_turns=2)
        found = [
            await asked(session, "9"),
            *(await asyncio.gather(asked(session, "9"), return_exceptions=True)),
        ]
        return session, found

    session, found = asyncio.run(main())
    assert lengths(found) == [10, "context_length_exceeded"]
    assert session.hit == "tokens"
