"""Conversations of tests: environments, engines that answer them, and one execution of the generator `multi-turn`."""

import asyncio
import functools

import numpy as np
from slime_core.config.functions import resolve_function
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, Environment, GenerateContext, Observation, SamplingParams
from slime_core.rollout.execution import Generator
from slime_core.samples import Sample
from slime_core.testing.contracts.runs import tabular_settings
from slime_core.testing.tabular import TabularEngine

from ..byte_tokenizer import ByteTokenizer


class Echo(Environment):
    """Says the length of each turn, and is done after `ends` of them; remembers how many there were."""

    closed = 0

    def __init__(self, *, ends: int = 2, opening: str | None = None, scores: bool = False):
        self.ends, self.opening, self.scores = ends, opening, scores
        self.seen = 0

    async def reset(self, sample):
        return self.opening

    async def step(self, sample, text):
        self.seen += 1
        reward = float(len(text)) if self.scores else None
        done = self.seen == self.ends
        return Observation(content=f"={len(text)};", done=done, reward=reward, info={"text": text})

    def state(self):
        return {"seen": self.seen}

    async def restore(self, sample, state):
        self.seen = state["seen"]

    async def close(self):
        Echo.closed += 1


class Letters(Echo):
    """An `Echo` in letters, whose last letter depends on the number of the turn."""

    async def step(self, sample, text):
        found = await super().step(sample, text)
        letters = "xyz"[self.seen % 3] + "abcdefgh"[len(text) % 8]
        return Observation(content=letters, done=found.done, reward=found.reward, info=found.info)


class ForgetfulLetters(Letters):
    """`Letters` that cannot go on."""

    def state(self):
        return None


class Scripted:
    """Says the given turns; `length` where the limit cuts one."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.asked = []

    async def generate(self, tokens, params, *, session_id=None):
        self.asked.append((bytes(tokens), params.max_new_tokens))
        turn = list(self.turns.pop(0))
        said = turn[: params.max_new_tokens]
        reason = "stop" if len(said) == len(turn) else "length"
        return Completion(tokens=said, log_probs=[-0.5] * len(said), finish_reason=reason, weight_version="1")


class Interrupted:
    """A table of letters that answers `abort` after so many tokens."""

    def __init__(self, inner, tokens):
        self.inner, self.left = inner, tokens

    async def generate(self, tokens, params, *, session_id=None):
        completion = await self.inner.generate(tokens, params)
        n = len(completion.tokens)
        if n > self.left:
            completion = Completion(
                tokens=completion.tokens[: self.left],
                log_probs=completion.log_probs[: self.left],
                finish_reason="abort",
                weight_version=completion.weight_version,
            )
        self.left -= min(n, self.left)
        return completion


def letters_engine():
    engine = TabularEngine()
    engine.table = np.random.default_rng(3).normal(size=engine.table.shape)
    engine.version = "2"
    return engine


@functools.cache
def _settings():
    registry = Registry()
    with tabular_settings(registry) as settings:
        return settings, registry


def converse(
    environment,
    engine,
    sample=None,
    *,
    max_new_tokens=100,
    stop=(),
    stop_token_ids=(),
    context=None,
    tokenizer=None,
    evaluation=None,
    **options,
):
    """Return the samples of one execution of `multi-turn` with an environment (module:class), its options bound as in a run.

    `context` bounds prompt and response in training; `evaluation`, where given, are the fields of an evaluation's context.
    """
    settings, registry = _settings()
    explicit = {"environment": environment, **options}
    function = resolve_function(
        settings, registry, "slime.generators", "multi-turn", where="args", explicit=explicit
    )
    generator = Generator(name="multi-turn", function=function, vocab_size=None, max_context_len=context)
    of_evaluation = {} if evaluation is None else {"evaluation": True, **evaluation}
    ctx = GenerateContext(engine=engine, tokenizer=tokenizer or ByteTokenizer(), **of_evaluation)
    sample = sample or Sample(index=4, tokens=list(b"ab"))
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=7, stop=stop, stop_token_ids=stop_token_ids)
    return asyncio.run(generator.execute(ctx, sample, params))


def record_of(sample):
    return sample.metadata["multi_turn"]
