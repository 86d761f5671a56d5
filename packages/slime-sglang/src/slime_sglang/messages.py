"""What a generation request and its answer look like to SGLang, and to slime."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slime_core.errors import EngineError
from slime_core.protocols import Completion, SamplingParams

from slime_sglang.section import ROUTED_EXPERTS

#: Seconds that SGLang measures of a request; `queue_time` only under --sglang-enable-metrics.
_TIMINGS = ("e2e_latency", "queue_time", "first_token_latency")


@dataclass(frozen=True)
class Routing:
    """What a server says of each token, where it says which experts the token passed."""

    n_layers: int
    topk: int


def routing_of(config: Mapping[str, Any], info: Mapping[str, Any]) -> Routing | None:
    """Return how a server says which experts each token passed; None where it does not.

    Args:
        config: the model's config.json.
        info: what the server answers to `/server_info`.
    """
    if not info.get("enable_return_routed_experts"):
        return None
    return Routing(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]))


def generate_request(
    tokens: Sequence[int], params: SamplingParams, *, routing: Routing | None = None
) -> dict[str, Any]:
    """Return the body of `/generate` for one response to the prompt ids `tokens`; with `routing`, and their experts."""
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
    body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
    return body if routing is None else body | {"return_routed_experts": True}


def completion(reply: Mapping[str, Any], *, n_prompt: int = 0, routing: Routing | None = None) -> Completion:
    """Return the completion that the answer to `/generate` holds.

    Args:
        reply: the answer.
        n_prompt: tokens of the prompt.
        routing: given where experts were asked for.

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
    if any(log_prob is None for log_prob, *_ in drawn):
        raise EngineError(
            "/generate: log-probs came that are no numbers; the server's weights or its numerics are broken"
        )
    return Completion(
        tokens=tokens,
        log_probs=[float(log_prob) for log_prob, *_ in drawn],
        finish_reason=reason["type"],
        weight_version=version,
        metadata={name: meta[name] for name in ("cached_tokens", "weight_versions") if name in meta}
        | {"timings": {name: float(meta[name]) for name in _TIMINGS if meta.get(name) is not None}}
        | ({} if routing is None else _routed_experts(meta, routing, n_prompt + len(tokens) - 1)),
    )


def _routed_experts(meta: Mapping[str, Any], routing: Routing, n_rows: int) -> dict[str, NDArray[np.int16]]:
    """Return the experts of each token as an entry of a completion's metadata; none of a request that was ended."""
    text = meta.get("routed_experts")
    if text is None:
        if meta["finish_reason"]["type"] == "abort":
            return {}
        raise EngineError("/generate: the experts of each token were asked for, and the answer has none")
    flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    shape = (n_rows, routing.n_layers, routing.topk)
    if flat.size != math.prod(shape):
        raise EngineError(
            f"/generate: {flat.size} experts came; wanted {n_rows} tokens x {routing.n_layers} layers x {routing.topk}"
        )
    return {ROUTED_EXPERTS: flat.reshape(shape).astype(np.int16)}


def aborted(weight_version: str) -> Completion:
    """Return the completion of a request that ended before anything was generated."""
    return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=weight_version)
