"""The generator `single-turn`: one prompt, one response."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slime_core import images
from slime_core.errors import SampleError
from slime_core.protocols import TOP_P_TOKENS, Completion, GenerateContext, SamplingParams
from slime_core.rollout.continuation import params_after, stop_across
from slime_core.sample import Sample, Status


async def single_turn(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample:
    """Generate the response, or go on with one that was aborted, within `max_new_tokens` for both together.

    The text is decoded from all response ids at once: decoded piece by piece, a character whose bytes two
    calls share would be lost. Only where earlier text is not what its ids spell (a generator put it there) is
    new text appended to it.

    Raises:
        SampleError: the sample is finished, has no prompt ids, or carries media that the engine does not take.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise SampleError(f"{sample.name}: status is {sample.status}; wanted pending or aborted")
    if not sample.tokens:
        raise SampleError(
            f"{sample.name}: has no prompt ids; set --apply-chat-template, or choose a generator that "
            "renders chat messages"
        )
    left = params_after(params, sample.response_length)
    if left.max_new_tokens <= 0:
        sample.status = Status.TRUNCATED
        return sample
    completion = await images.generate(ctx, sample, left)
    if sample.response_length:
        completion = _until_stop(ctx, sample, completion, params)
    _append(ctx, sample, completion, skip_special_tokens=params.skip_special_tokens)
    return sample


def _until_stop(
    ctx: GenerateContext, sample: Sample, completion: Completion, params: SamplingParams
) -> Completion:
    """Return the completion up to a stop string that the sample's earlier tokens begin."""
    seam = sample.response_length
    end = stop_across(sample.response_tokens + completion.tokens, seam, params, ctx.tokenizer)
    if end is None:
        return completion
    metadata = dict(completion.metadata)
    if "routed_experts" in metadata:
        metadata["routed_experts"] = metadata["routed_experts"][: sample.prompt_length + end - 1]
    if TOP_P_TOKENS in metadata:
        ids, offsets = metadata[TOP_P_TOKENS]
        metadata[TOP_P_TOKENS] = (ids[: offsets[end - seam]], offsets[: end - seam + 1])
    if "weight_versions" in metadata:
        metadata["weight_versions"] = [
            span for span in metadata["weight_versions"] if span["start"] < end - seam
        ]
    return dataclasses.replace(
        completion,
        tokens=completion.tokens[: end - seam],
        log_probs=completion.log_probs[: end - seam],
        finish_reason="stop",
        metadata=metadata,
    )


def _append(
    ctx: GenerateContext, sample: Sample, completion: Completion, *, skip_special_tokens: bool
) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return ctx.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    n_prompt = len(sample.tokens)
    earlier = sample.response_tokens
    if not earlier or sample.response == decode(earlier):
        text = decode(earlier + completion.tokens)
    else:
        text = sample.response + decode(completion.tokens)
    sample.append_response(
        completion.tokens,
        log_probs=completion.log_probs,
        finish_reason=completion.finish_reason,
        routed_experts=completion.metadata.get("routed_experts"),
        top_p_tokens=completion.metadata.get(TOP_P_TOKENS),
    )
    sample.response = text
    spans = completion.metadata.get("weight_versions")
    sample.weight_versions += [span["version"] for span in spans] if spans else [completion.weight_version]
    for name, seconds in completion.metadata.get("timings", {}).items():
        sample.timings[name] = sample.timings.get(name, 0.0) + seconds
    for name, count in completion.metadata.get("spec_info", {}).items():
        sample.spec_info[name] = sample.spec_info.get(name, 0) + count
    if "cached_tokens" in completion.metadata:
        counts = sample.prefix_cache_info
        counts["cached_tokens"] = counts.get("cached_tokens", 0) + int(completion.metadata["cached_tokens"])
        counts["total_prompt_tokens"] = counts.get("total_prompt_tokens", 0) + n_prompt
