"""A turn: one completion appended to a sample with all its bookkeeping, also in continuation of an aborted turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import SampleError
from slime_core.protocols.capabilities import EngineCapabilities
from slime_core.protocols.continuation import params_after, stop_across
from slime_core.protocols.engine import IMAGE, TOP_P_TOKENS, Completion, Generates, SamplingParams
from slime_core.protocols.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slime_core.samples import Sample

#: Ids before others that are decoded with them: enough for a character of several ids, and for a special one beside a word.
_CONTEXT = 32
#: What stands in a text for bytes that are no character.
_REPLACED = "\N{REPLACEMENT CHARACTER}"


async def request(
    engine: Generates, capabilities: EngineCapabilities, sample: Sample, params: SamplingParams
) -> Completion:
    """Have the engine generate from a sample's tokens, with its images.

    Raises:
        SampleError: it carries media that the engine does not take.
    """
    media = sample.multimodal_inputs
    if not media:
        return await engine.generate(sample.tokens, params, session_id=sample.session_id)
    if set(media) != {IMAGE} or not capabilities.images:
        takes = f"{IMAGE} only" if capabilities.images else "ids only"
        raise SampleError(
            f"{sample.name}: carries {sorted(media)}, and the engine takes {takes}; choose an engine that takes "
            "images (sglang), or a generator that sends such media"
        )
    return await engine.generate(sample.tokens, params, session_id=sample.session_id, images=media[IMAGE])


def until_stop(
    completion: Completion, sample: Sample, params: SamplingParams, tokenizer: Tokenizer
) -> Completion:
    """Return the completion up to a stop string that earlier tokens of the same turn begin.

    Args:
        completion: that follows the sample's tokens.
        sample: without it.
        params: of the whole response.
        tokenizer: decodes the tokens around the seam.
    """
    seam = sample.response_length - sample.turn_begin
    if not seam:
        return completion
    begun = sample.response_tokens[sample.turn_begin :]
    of_turn = params_after(params, sample.generated_length - seam)
    end = stop_across(begun + completion.tokens, seam, of_turn, tokenizer)
    if end is None:
        return completion
    n, metadata = end - seam, dict(completion.metadata)
    if "routed_experts" in metadata:
        metadata["routed_experts"] = metadata["routed_experts"][: len(sample.tokens) + n - 1]
    if TOP_P_TOKENS in metadata:
        ids, offsets = metadata[TOP_P_TOKENS]
        metadata[TOP_P_TOKENS] = (ids[: offsets[n]], offsets[: n + 1])
    if "weight_versions" in metadata:
        metadata["weight_versions"] = [span for span in metadata["weight_versions"] if span["start"] < n]
    return dataclasses.replace(
        completion,
        tokens=completion.tokens[:n],
        log_probs=completion.log_probs[:n],
        finish_reason="stop",
        metadata=metadata,
    )


def append_completion(
    sample: Sample, completion: Completion, tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> str:
    """Append a completion with all that the engine reports of it; returns the text of the turn, its earlier part included.

    A turn is decoded from all its ids at once: decoded piece by piece, a character whose bytes two requests share would be
    lost. Only where earlier text is not what its ids spell (a generator put it there) is new text appended to it.
    """
    n_prompt, n_before, begin = len(sample.tokens), sample.response_length, sample.turn_begin
    before, turn, earlier = sample.response_tokens[:begin] if begin else [], completion.tokens, ""
    if n_before > begin:
        begun = sample.response_tokens[begin:]
        earlier = text_after(before, begun, tokenizer, skip_special_tokens=skip_special_tokens)
        turn = begun + turn
    text = text_after(before, turn, tokenizer, skip_special_tokens=skip_special_tokens)
    if sample.response.endswith(earlier):
        whole = sample.response[: len(sample.response) - len(earlier)] + text
    else:
        whole = sample.response + tokenizer.decode(completion.tokens, skip_special_tokens=skip_special_tokens)
    metadata = completion.metadata
    sample.append_response(
        completion.tokens,
        log_probs=completion.log_probs,
        finish_reason=completion.finish_reason,
        routed_experts=metadata.get("routed_experts"),
        top_p_tokens=metadata.get(TOP_P_TOKENS),
    )
    sample.response = whole
    _note_versions(sample, completion, n_before)
    _count(sample, completion, n_prompt)
    return text


def text_after(
    before: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> str:
    """Return what `tokens` spell after others: some tokenizers leave the first space of a text out.

    Of the others the last ones are decoded alone, so that the turns of a long response do not each decode it all.
    """
    if not tokens:
        return ""
    before = before[-_CONTEXT:]
    if not before:
        return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    head = tokenizer.decode(before, skip_special_tokens=skip_special_tokens)
    whole = tokenizer.decode([*before, *tokens], skip_special_tokens=skip_special_tokens)
    if not whole.startswith(head):  # it ends within a character
        return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    return whole[len(head) :]


def text_to_stop(
    before: Sequence[int],
    tokens: Sequence[int],
    stop: Sequence[str],
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
) -> tuple[str, str | None]:
    """Return what a finished turn spells, cut after the stop string that its last token completes, and that string.

    Engines keep the whole last token, which often spells more than the end of a stop string, such as `>.` of `</answer>.`.
    Where it completes several stop strings, the first one counts, and of those that end at one place the longest.

    Args:
        before: what stands before the turn.
        tokens: of the turn, which neither a limit nor an abort has ended.
        stop: the stop strings.
        tokenizer: decodes the turn.
        skip_special_tokens: leave special tokens out of the text.

    Returns:
        All of the text, and None, where the last token completes no stop string.
    """
    text = text_after(before, tokens, tokenizer, skip_special_tokens=skip_special_tokens)
    if not stop or not text:
        return text, None
    head = text_after(before, tokens[:-1], tokenizer, skip_special_tokens=skip_special_tokens)
    n_head = len(head.rstrip(_REPLACED))  # it may end within a character that the last token completes
    found: list[tuple[int, int, str]] = []
    for one in stop:
        begin = text.find(one, max(0, n_head - len(one) + 1))
        if one and begin >= 0:
            found.append((begin + len(one), begin, one))
    if not found:
        return text, None
    end, _, ended_by = min(found)
    return text[:end], ended_by


def _note_versions(sample: Sample, completion: Completion, begin: int) -> None:
    """Add the weight versions of a completion, whose first token is the response's token `begin`."""
    if not completion.tokens:
        return
    spans: Sequence[Mapping[str, Any]] | None = completion.metadata.get("weight_versions")
    if not spans:
        sample.weight_versions = [*sample.weight_versions, completion.weight_version]
        sample.weight_version_starts = [*sample.weight_version_starts, begin]
        return
    sample.weight_versions = [*sample.weight_versions, *(span["version"] for span in spans)]
    starts = (begin + span["start"] for span in spans)
    sample.weight_version_starts = [*sample.weight_version_starts, *starts]


def _count(sample: Sample, completion: Completion, n_prompt: int) -> None:
    """Add what the engine measured of a request of `n_prompt` tokens."""
    if not completion.metadata:
        return
    for name, seconds in completion.metadata.get("timings", {}).items():
        sample.timings[name] = sample.timings.get(name, 0.0) + seconds
    for name, count in completion.metadata.get("spec_info", {}).items():
        sample.spec_info[name] = sample.spec_info.get(name, 0) + count
    if "cached_tokens" in completion.metadata:
        counts = sample.prefix_cache_info
        counts["cached_tokens"] = counts.get("cached_tokens", 0) + int(completion.metadata["cached_tokens"])
        counts["total_prompt_tokens"] = counts.get("total_prompt_tokens", 0) + n_prompt
