"""`/generate`: a request as SGLang takes it, answered by any engine: ids in, ids and log-probs out.

Source: SGLang's native API. Fields that an engine of ours cannot honour are refused by name, never left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from slime_core.errors import DataError
from slime_core.protocols import TOP_P_TOKENS, Completion, Generates, SamplingParams, Tokenizer

#: Sampling parameter of SGLang -> ours; values of None mean the default.
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "sampling_seed": "seed",
    "seed": "seed",
}
#: Sampling parameters that change nothing here, as they are, or only with one value.
_IDLE = {"no_stop_trim", "spaces_between_special_tokens", "custom_params", "stream_interval"}
_NEUTRAL = {
    "n": (1,),
    "ignore_eos": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
}
#: Fields of a request that are read, or change nothing here.
_FIELDS = {
    "text",
    "input_ids",
    "image_data",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "return_text_in_logprobs",
    "return_routed_experts",
    "rid",
    "session_id",
    "priority",
    "model",
}


def sampling_params(given: Mapping[str, Any] | None, *, default_seed: int | None = None) -> SamplingParams:
    """Return the parameters of a request.

    Args:
        given: as the request has them.
        default_seed: where it has none.

    Raises:
        DataError: one is unknown, or has a value that engines here do not take.
    """
    values: dict[str, Any] = {"max_new_tokens": 128, "skip_special_tokens": True, "seed": default_seed}
    for name, value in (given or {}).items():
        if value is None or name in _IDLE or value in _NEUTRAL.get(name, ()):
            continue
        if name not in _PARAMS:
            raise DataError(
                f"sampling_params.{name}: found {value!r}; wanted one of {', '.join(_PARAMS)}, which the engine takes"
            )
        values[_PARAMS[name]] = value
    stop = values.get("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    ids = values.get("stop_token_ids", ())
    values["stop_token_ids"] = (ids,) if isinstance(ids, int) else tuple(ids)
    return SamplingParams(**values)


async def answer(
    payload: Mapping[str, Any],
    engine: Generates,
    tokenizer: Tokenizer,
    *,
    default_seed: int | None = None,
    session_id: str | None = None,
) -> dict[str, Any]:
    """Answer one request.

    Args:
        payload: its JSON.
        engine: generates.
        tokenizer: decodes, and encodes a prompt that came as text.
        default_seed: where the request has none.
        session_id: keeps requests of one sample on one server.

    Raises:
        DataError: the request is not one, or asks for what no engine here gives; names the field.
    """
    unknown = {name for name, value in payload.items() if value and name not in _FIELDS}
    if payload.get("return_logprob") and payload.get("logprob_start_len") not in (None, -1):
        unknown.add("logprob_start_len")  # asks for the prompt's log-probs
    if unknown:
        raise DataError(
            f"/generate: found the fields {', '.join(sorted(unknown))}; wanted {', '.join(sorted(_FIELDS))}"
        )
    params = sampling_params(payload.get("sampling_params"), default_seed=default_seed)
    ids = payload.get("input_ids")
    if ids is None:
        if not isinstance(payload.get("text"), str):
            raise DataError("/generate: found neither input_ids nor text; wanted the ids of one prompt")
        ids = tokenizer.encode(payload["text"])
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
        raise DataError("/generate: input_ids is no list of ids; wanted those of one prompt")
    if params.max_new_tokens < 1:
        nothing = Completion(tokens=[], log_probs=[], finish_reason="length", weight_version="")
        return _response(payload, nothing, len(ids), params, tokenizer)
    images = payload.get("image_data") or ()
    shown = {"images": [images] if isinstance(images, str) else list(images)} if images else {}
    completion = await engine.generate(ids, params, session_id=session_id, **shown)
    return _response(payload, completion, len(ids), params, tokenizer)


def versions_in(meta: Mapping[str, Any]) -> list[str]:
    """Return the versions of the weights that generated an answer's tokens, in order, by its `meta_info`; none where it has none."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version") or ""}]
    return [str(span["version"]) for span in spans if span["version"] != ""]


def next_seed(params: SamplingParams | None, number: int) -> int | None:
    """Return the seed of a sample's request: requests for one prompt are to differ, and a run to be repeatable."""
    if params is None or params.seed is None:
        return None
    return params.seed if number == 0 else (params.seed + number * 0x9E3779B97F4A7C15) % 2**63


def _response(
    payload: Mapping[str, Any],
    completion: Completion,
    n_prompt: int,
    params: SamplingParams,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    tokens = [int(token) for token in completion.tokens]
    text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
    given = payload.get("sampling_params") or {}
    if completion.finish_reason == "stop" and not given.get("no_stop_trim"):
        text = next((text[: -len(stop)] for stop in params.stop if stop and text.endswith(stop)), text)
    told = completion.metadata
    meta: dict[str, Any] = {
        "id": str(payload.get("rid") or ""),
        "finish_reason": _finish(completion, tokens, params),
        "prompt_tokens": n_prompt,
        "completion_tokens": len(tokens),
        "cached_tokens": int(told.get("cached_tokens", 0)),
        "weight_version": completion.weight_version,
        **told.get("timings", {}),
        **told.get("spec_info", {}),
    }
    if spans := told.get("weight_versions"):
        meta["weight_versions"] = [dict(span) for span in spans]
    if payload.get("return_logprob"):
        with_text = payload.get("return_text_in_logprobs")
        texts = [
            tokenizer.decode([token], skip_special_tokens=False) if with_text else None for token in tokens
        ]
        meta["output_token_logprobs"] = [
            [float(log_prob), token, text]
            for log_prob, token, text in zip(completion.log_probs, tokens, texts, strict=True)
        ]
    if payload.get("return_routed_experts") and told.get("routed_experts") is not None:
        routed = np.ascontiguousarray(told["routed_experts"], dtype=np.int32)
        meta["routed_experts"] = base64.b64encode(routed.tobytes()).decode()
    if TOP_P_TOKENS in told:
        ids, offsets = told[TOP_P_TOKENS]
        meta["top_p_token_ids"] = [int(one) for one in ids]
        meta["top_p_token_offsets"] = [int(one) for one in offsets]
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def _finish(completion: Completion, tokens: list[int], params: SamplingParams) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "length":
        reason["length"] = params.max_new_tokens
    if completion.finish_reason == "stop" and tokens:
        reason["matched"] = tokens[-1]
    return reason
