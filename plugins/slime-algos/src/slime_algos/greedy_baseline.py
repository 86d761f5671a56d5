"""The generator `greedy-baseline`: a sampled response and the greedy one, which is not trained on."""

from __future__ import annotations

import asyncio
import dataclasses

from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import reset
from slime_core.samples import Sample, Status

#: Key of a sample's `train_metadata` by which `remax` knows the greedy response.
IS_BASELINE = "is_baseline"


async def greedy_baseline(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> list[Sample]:
    """Generate a response as `single-turn` does, and the greedy response to the same prompt, for `remax`.

    The two are one execution. The greedy one has `remove_sample` set: it is scored, and no token of it is trained
    on. One that is aborted begins anew, because half an execution has no baseline. In an evaluation there is
    no second response.
    """
    if ctx.evaluation:
        return [await single_turn(ctx, sample, params)]
    fresh = reset(sample)
    greedy = dataclasses.replace(
        reset(sample),
        session_id=None,
        remove_sample=True,
        train_metadata={**(sample.train_metadata or {}), IS_BASELINE: True},
    )
    sample.rollout_id = greedy.rollout_id = sample.index
    first, second = await asyncio.gather(
        single_turn(ctx, sample, params),
        single_turn(ctx, greedy, dataclasses.replace(params, temperature=0.0, top_p=1.0, top_k=-1)),
    )
    if Status.ABORTED in (first.status, second.status):
        fresh.status = Status.ABORTED
        return [fresh]
    return [first, second]
