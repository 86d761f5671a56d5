"""What a generation request and its answer look like to SGLang, and to slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import EngineError
from slime_core.protocols import Completion, SamplingParams

#: Seconds that SGLang measures of a request; `queue_time` only under --sglang-enable-metrics.
_TIMINGS = ("e2e_latency", "queue_time", "first_token_latency")


def generate_request(tokens: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Return the body of `/generate` for one response to the prompt ids `tokens`."""
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if params.seed is not None:  # SGLang heeds it under --enable-deterministic-inference
        sampling["sampling_seed"] = params.seed % 2**63
    return {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}


def completion(reply: Mapping[str, Any]) -> Completion:
    """Return the completion that the answer to `/generate` holds.

    Raises:
        EngineError: the server gave the request up, or the answer lacks what was asked for.
    """
    try:
        meta = reply["meta_info"]
        drawn = meta.get("output_token_logprobs") or []
        reason, tokens, version = (
            meta["finish_reason"],
            list(reply["output_ids"]),
            str(meta["weight_version"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"/generate: the answer is not SGLang's: {str(reply)[:300]}") from error
    if reason["type"] == "abort" and reason.get("status_code"):
        raise EngineError(f"/generate: the server gave the request up: {reason.get('message')}")
    if [token for _, token, *_ in drawn] != tokens:
        raise EngineError(f"/generate: {len(tokens)} tokens came with the log-probs of {len(drawn)} others")
    return Completion(
        tokens=tokens,
        log_probs=[float(log_prob) for log_prob, *_ in drawn],
        finish_reason=reason["type"],
        weight_version=version,
        metadata={name: meta[name] for name in ("cached_tokens", "weight_versions") if name in meta}
        | {"timings": {name: float(meta[name]) for name in _TIMINGS if meta.get(name) is not None}},
    )


def aborted(weight_version: str) -> Completion:
    """Return the completion of a request that ended before anything was generated."""
    return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=weight_version)
