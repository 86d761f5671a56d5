"""Limits of a session hold for requests side by side, and turns that end in another way take nothing from the others."""

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


def test_requests_at_once_have_the_tokens_of_the_session_together():
    """Of 100: 30 and the end, the same, and what is left of 50; the last one finds nothing."""
    engine = Saying()

    async def main():
        session = session_of(engine)
        asking = [asked(session, said) for said in ("30", "30", "50", "1")]
        engine.gate.set()
        return session, await asyncio.gather(*asking, return_exceptions=True)

    session, found = asyncio.run(main())
    assert lengths(found) == [31, 31, 38, "context_length_exceeded"]
    assert (session.tape.n_sampled, session.hit) == (100, "tokens")


def test_requests_whose_tokens_all_fit_are_generated_side_by_side_and_one_more_waits():
    engine = Saying()

    async def main():
        session = session_of(engine)
        asking = [asked(session, "20", max_tokens=40) for _ in range(3)]
        await settled()
        n_at_once = engine.n_came
        engine.gate.set()
        return n_at_once, await asyncio.gather(*asking)

    n_at_once, found = asyncio.run(main())
    assert n_at_once == 2
    assert lengths(found) == [21, 21, 21]


def test_the_context_bounds_what_a_request_holds():
    """A prompt of 19 tokens and its own 2: in a context of 61, 40 are left to say."""
    engine = Saying()

    async def main():
        session = session_of(engine, context=61)
        asking = [asked(session, "20") for _ in range(2)]
        await settled()
        n_at_once = engine.n_came
        engine.gate.set()
        return n_at_once, await asyncio.gather(*asking)

    n_at_once, found = asyncio.run(main())
    assert (n_at_once, lengths(found)) == (2, [21, 21])


def test_a_turn_that_fails_gives_its_tokens_to_those_that_wait():
    engine = Saying()

    async def main():
        session = session_of(engine)
        asking = [asked(session, "fail"), asked(session, "120")]
        await settled()
        assert engine.n_came == 1
        engine.gate.set()
        return await asyncio.gather(*asking, return_exceptions=True)

    assert lengths(asyncio.run(main())) == ["engine", 100]


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_turn_that_is_cancelled_in_flight_or_while_it_waits_holds_nothing(cancelled):
    engine = Saying()

    async def main():
        session = session_of(engine)
        turns = [
            asyncio.create_task(session.tape.turn([{"role": "user", "content": said}]))
            for said in ("9", "10", "120")
        ]
        await settled()
        turns[cancelled].cancel()
        await settled()
        engine.gate.set()
        return await asyncio.gather(*turns, return_exceptions=True)

    found = asyncio.run(main())
    assert isinstance(found.pop(cancelled), asyncio.CancelledError)
    first = 11 if cancelled == 0 else 10
    assert lengths(found) == [first, 100 - first]


def test_a_session_that_is_closed_ends_turns_that_wait():
    engine = Saying()

    async def main():
        session = session_of(engine)
        asking = [asked(session, "9") for _ in range(3)]
        await settled()
        await session.close()
        return await asyncio.gather(*asking, return_exceptions=True)

    assert [type(one) for one in asyncio.run(main())] == [asyncio.CancelledError] * 3
