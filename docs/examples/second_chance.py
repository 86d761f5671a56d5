"""A generator of two turns: the policy answers, reads a remark, and answers again.

slime train RECIPE --custom-generate-function-path docs.examples.second_chance:second_chance
"""

from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.continuation import params_after
from slime_core.rollout.driver import reset
from slime_core.sample import Sample, Status


async def second_chance(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample:
    """Generate an answer, append the remark of the row's metadata, and generate another answer after it."""
    session, sample = sample.session_id, reset(sample)  # one that was aborted earlier begins anew
    remark = str(sample.metadata["remark"])
    remark_ids = ctx.tokenizer.encode(remark)
    for turn in (1, 2):
        left = params_after(params, sample.response_length)
        answer = await ctx.engine.generate(sample.tokens, left, session_id=session)
        sample.append_response(
            answer.tokens,
            log_probs=answer.log_probs,
            text=ctx.tokenizer.decode(answer.tokens),
            finish_reason=answer.finish_reason,
            weight_version=answer.weight_version,
        )
        if turn == 2 or sample.status is not Status.COMPLETED:  # out of tokens, or aborted: no further turn
            break
        if params_after(params, sample.response_length + len(remark_ids)).max_new_tokens < 1:
            break  # the budget is of all turns together, the remark included: the first answer stands
        sample.append_response(remark_ids, trainable=False, text=remark)
    return sample
