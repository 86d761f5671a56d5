"""The generator `single-turn`: one prompt, one response."""

from __future__ import annotations

from slime_core.errors import SampleError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status


async def single_turn(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample:
    """Generate the response, or continue an aborted one; `max_new_tokens` bounds both parts together.

    Raises:
        SampleError: the sample is finished, has no prompt ids, or carries media that the engine does not take.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise SampleError(f"{sample.name}: status is {sample.status}; wanted pending or aborted")
    await ctx.turn(sample, params)
    return sample
