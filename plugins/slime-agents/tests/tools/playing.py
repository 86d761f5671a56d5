"""Playing the generator `tool-loop` on one sample with an engine that says given things."""

from __future__ import annotations

import asyncio
import functools

from slime_agents.section import AgentsSection
from slime_agents.tools.loop import ToolLoop
from slime_core.plugins.bind import bind, choose_options
from slime_core.plugins.registry import Registry
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample

from ..byte_chat import ByteChat, SayingEngine


@functools.cache
def registry():
    return Registry()


def resolve(group, reference, *, where, explicit):
    function = registry().resolve(group, reference)
    return bind(function, choose_options(function, where=where, explicit=explicit))


def loop_of(**settings):
    return ToolLoop(settings=AgentsSection(**settings), resolve=resolve)


def played(say, *, n=1, max_new_tokens=4000, prompt="what is 6 times 7?", context=None, **settings):
    """Play samples at once; returns them and the engine."""
    engine = SayingEngine(say)
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)

    async def play():
        loop = loop_of(**settings)
        ctx = GenerateContext(engine=engine, tokenizer=ByteChat(), max_context_len=context)
        samples = [Sample(index=i, group_index=0, prompt=prompt) for i in range(n)]
        try:
            return await asyncio.gather(*(loop(ctx, sample, params) for sample in samples))
        finally:
            await loop.close()

    return asyncio.run(play()), engine


def results_of(sample):
    return [
        call["result"] for turn in sample.metadata["multi_turn"]["info"] for call in turn.get("calls", ())
    ]
