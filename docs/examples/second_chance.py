"""A generator of two turns: the policy answers, reads a remark, and answers again.

slime train RECIPE --custom-generate-function-path docs.examples.second_chance:second_chance
"""

from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.group import reset
from slime_core.samples import Sample, Status


async def second_chance(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample:
    """Generate an answer, append the remark of the row's metadata, and generate another answer after it."""
    session, sample = sample.session_id, reset(sample)  # one that was aborted earlier begins anew
    sample.session_id = session
    await ctx.turn(sample, params)
    if sample.status is Status.COMPLETED and ctx.remaining(sample, params).max_new_tokens > 0:
        ctx.append(sample, str(sample.metadata["remark"]))
        await ctx.turn(sample, params)
    return sample
