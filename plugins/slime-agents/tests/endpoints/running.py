"""Running the generator `agent` on one sample with an engine that says given things."""

from __future__ import annotations

import asyncio

from slime_agents.endpoints.agent import Agent
from slime_agents.section import AgentsSection
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample

from ..byte_chat import ByteChat, SayingEngine


def no_plugins(group, reference, *, where, explicit):
    raise AssertionError(f"nothing is to be looked up: {group} {reference}")


async def run_agent(
    function, say, *, n=1, max_new_tokens=2000, engine=None, over=None, tokenizer=None, **settings
):
    """Run a function as the agent of `n` samples at once; returns a list of the samples of each, and the engine."""
    engine = engine or SayingEngine(say)
    if function is None:
        made = Agent(settings=AgentsSection(**settings), resolve=no_plugins)
    else:
        made = GivenAgent(function, AgentsSection(**settings))
    ctx = GenerateContext(engine=engine, tokenizer=tokenizer or ByteChat(), over=over or asyncio.Event())
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)

    async def one(i):
        prompt = [{"role": "user", "content": f"task {i}"}]
        sample = Sample(index=i, group_index=0, prompt=prompt)
        done = await made(ctx, sample, params)
        return done if isinstance(done, list) else [done]

    try:
        return await asyncio.gather(*(one(i) for i in range(n))), engine
    finally:
        await made.close()


class GivenAgent(Agent):
    """An agent whose function is given, and not imported."""

    def __init__(self, function, settings):
        super().__init__(
            settings=settings.model_copy(update={"function": "asyncio:sleep"}), resolve=no_plugins
        )
        self._function = function


def played(function, say, **settings):
    """Run one agent; returns its samples and the engine."""
    (samples,), engine = asyncio.run(run_agent(function, say, **settings))
    return samples, engine


def check_tape(samples, engine):
    """Each id that was sampled is trained on once, at its place, with its log-prob."""
    places = {}
    for number, sample in enumerate(samples):
        sample.check()
        mask = sample.loss_mask or [1] * sample.response_length
        for i in range(sample.response_length):
            if mask[i]:
                log_prob = sample.rollout_log_probs[i]
                assert log_prob not in places
                places[log_prob] = (number, sample.prompt_length + i)
    assert len(places) == sum(len(ids) for _, ids, _ in engine.requests)
    for prompt, ids, log_probs in engine.requests:
        for i, log_prob in enumerate(log_probs):
            number, position = places[log_prob]
            assert position == len(prompt) + i
            assert samples[number].tokens[position] == ids[i]
        number, position = places[log_probs[0]]
        assert list(samples[number].tokens[:position]) == prompt
