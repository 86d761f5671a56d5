"""Parts of asynchronous runs over a table of letters: an engine whose responses take their time, and ways to use them."""

from __future__ import annotations

import asyncio
import dataclasses
import random

from slime_core.config.factories import EngineFactory
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import reset, run_group
from slime_core.samples import Status
from slime_core.testing.tabular import TabularEngine


class SlowEngine(TabularEngine):
    """Begins each response after a heavy-tailed delay, which depends on the seed alone; an abort ends the delay."""

    def __init__(self):
        super().__init__()
        self._aborted = asyncio.Event()

    async def generate(self, tokens, params, *, session_id=None):
        aborted, seconds = self._aborted, min(0.2, random.Random(params.seed).lognormvariate(-5, 1.2))
        try:
            async with asyncio.timeout(seconds):
                await aborted.wait()
            params = dataclasses.replace(params, max_new_tokens=1)
            first = await super().generate(tokens, params, session_id=session_id)
            return dataclasses.replace(first, finish_reason="abort")
        except TimeoutError:
            return await super().generate(tokens, params, session_id=session_id)

    async def abort(self):
        await super().abort()
        self._aborted.set()
        self._aborted = asyncio.Event()


#: The engine of the runs.
create_engine = EngineFactory(lambda build: SlowEngine(), SlowEngine.capabilities)


def some(group):
    """Drop a third of the prompts."""
    return "third" if group[0].group_index % 3 == 0 else None


async def two_responses(ctx, sample, params):
    """One execution of two samples."""
    other = reset(sample)
    sample.rollout_id = other.rollout_id = sample.index
    return list(await asyncio.gather(single_turn(ctx, sample, params), single_turn(ctx, other, params)))


async def two_turns(ctx, sample, params):
    """A turn, a remark of the environment after a while, a turn. One that was aborted begins anew."""
    index, sample = sample.index, reset(sample)
    sample = await single_turn(ctx, sample, dataclasses.replace(params, max_new_tokens=1))
    if sample.status is Status.ABORTED:
        return sample
    await asyncio.sleep(random.Random(index).uniform(0, 0.02))
    sample.append_response([0], trainable=False, text="a")
    answer = await ctx.engine.generate(sample.tokens, dataclasses.replace(params, max_new_tokens=1))
    sample.append_response(
        answer.tokens,
        log_probs=answer.log_probs,
        text=ctx.tokenizer.decode(answer.tokens),
        finish_reason=answer.finish_reason,
        weight_version=answer.weight_version,
    )
    return sample


async def other_rollout(run, step):
    """A rollout function of somebody else: it generates as long as the filter leaves something to do."""
    kept = []
    while n := run.sizes.rollout_batch_size - len(kept):
        work = (run_group(run, group, params_of=run.sampling_params) for group in run.take(n))
        for group in await asyncio.gather(*work):
            reason = run.drop_reason(group)
            if reason is None:
                kept.append(group)
            else:
                run.record_drop(group, reason)
    return kept


async def own_prompts(ctx, sample, params):
    """Bring a prompt, a letter a group, for a run without a data set."""
    if not sample.tokens:
        sample.prompt = chr(97 + sample.group_index % 10)
        sample.tokens, sample.label = ctx.tokenizer.encode(sample.prompt), "x"
    return await single_turn(ctx, sample, params)
