"""`PartialResponse`: what has arrived of one response; makes the bodies of SGLang's `/generate`, and takes the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slime_core.errors import EngineError
from slime_core.protocols import Completion, SamplingParams, Tokenizer
from slime_core.protocols.continuation import params_after, stop_across

from slime_sglang.generation.images import check_prompt_ids, fold_placeholders
from slime_sglang.generation.routed_experts import RoutedExpertsFormat
from slime_sglang.http.client import REQUEST_FLAG, ServerFaultError, SglangClient
from slime_sglang.settings.section import ROUTED_EXPERTS
from slime_sglang.weights.protocol import NONE_SENT, UNSENT

#: Counters of speculative decoding: our name, and SGLang's of one request.
_SPECULATION = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
    "spec_verify_ct": "spec_verify_ct",
    "completion_token_num": "completion_tokens",
}
#: Seconds that SGLang measures of a request; `queue_time` only under --sglang-enable-metrics.
_TIMINGS = ("e2e_latency", "queue_time", "first_token_latency")


class PartialResponse:
    """What has arrived of one response, by one request or, where engines were lost, by several.

    A further request continues from the tokens that arrived. What is drawn by seed is what would have been drawn:
    SGLang's noise belongs to the seed and the position in the whole sequence.

    Args:
        prompt: ids.
        params: of the whole response.
        tokenizer: finds a stop string that spans two requests; without it there may be one request only.
        images: of the prompt, as `data:` URLs; each request has them all.
        newest: version of the weights when the response begins.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        images: Sequence[str] = (),
        newest: str = NONE_SENT,
    ) -> None:
        self._prompt, self._params, self._tokenizer = list(prompt), params, tokenizer
        self._images, self._newest = list(images), newest
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._begins: list[int] = []
        self._spans: list[tuple[str, int, int]] = []
        self._version: str | None = None
        self._finish_reason: str | None = None
        self._timings: dict[str, float] = {}
        self._counters: dict[str, int] = {}
        self._speculation: dict[int, dict[str, int]] = {}
        self._experts_format: RoutedExpertsFormat | None = None
        self._routed_experts: NDArray[np.int16] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to generate."""
        is_full = len(self._tokens) >= self._params.max_new_tokens
        return self._finish_reason is not None or (is_full and self._experts_format is None)

    def reopen(self) -> None:
        """Let a response continue that was aborted."""
        if self._finish_reason == "abort":
            self._finish_reason = None

    def request(
        self,
        *,
        stream: bool,
        experts_format: RoutedExpertsFormat | None = None,
        placeholder: int | None = None,
    ) -> dict[str, Any]:
        """Return the body of `/generate` for what is left; what is taken from now on answers it.

        Args:
            stream: have the tokens come as they are generated.
            experts_format: have the last answer report the experts of each token, earlier ones included.
            placeholder: id that stands for images in the model's prompts; None where it takes none.

        Raises:
            EngineError: the model takes no images, or the ids have not one run of placeholders for each.
        """
        assert self._tokenizer is not None or not self._begins, "a second request, and no tokenizer"
        self._experts_format = experts_format
        if (
            len(self._tokens) >= self._params.max_new_tokens
        ):  # all but the experts arrived: generating the last token again brings them
            self._truncate(self._params.max_new_tokens - 1)
        self._begins.append(len(self._tokens))
        params = params_after(self._params, len(self._tokens))
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
        tokens = self._prompt + self._tokens
        body = {
            "input_ids": tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }
        if self._images:
            body["input_ids"] = fold_placeholders(tokens, placeholder, n_images=len(self._images))
            body |= {"image_data": self._images, "return_prompt_token_ids": True}
        return body if experts_format is None else body | {"return_routed_experts": True}

    def take(self, answer: Any) -> None:
        """Add an answer to the last request, or one event of a streamed answer.

        The tokens are those since the event before, or all of the request. Tokens of an event that spans an update of
        the weights count to the later version, until the last event gives the exact places.

        Raises:
            ServerFaultError: it is not SGLang's, does not continue what arrived before, or reports a fault of the server.
            EngineError: the server refused the request.
        """
        if isinstance(answer, Mapping) and "error" in answer:
            raise _refusal(answer["error"])
        meta, ids, drawn, n_tokens, version, reason = _fields(answer)
        kind = None if reason is None else str(reason["type"])
        if reason is not None and kind == "abort" and reason.get("status_code"):
            raise _refusal({"code": reason["status_code"], "message": reason.get("message")})
        if version == UNSENT and self._newest != NONE_SENT:
            raise EngineError(
                f"/generate: the server has the weights that it started with, and should have version {self._newest}; "
                "somebody started it anew: start the run again, which resumes"
            )
        begin, had = self._begins[-1], len(self._tokens)
        reported = [token for _, token in drawn]
        new = drawn[had - begin :] if len(drawn) == n_tokens else drawn
        # SGLang 0.5.23 repeats the last id where a request is aborted while it waits (tokenizer_manager.py).
        if had - begin + len(new) != n_tokens or (ids != reported and (new or ids != reported[-1:])):
            raise ServerFaultError(
                f"/generate: found {len(ids)} ids and {len(drawn)} log-probs after {had - begin} tokens of {n_tokens}"
            )
        if self._images and (
            n_tokens or kind != "abort"
        ):  # it may be aborted before the server reads the prompt
            check_prompt_ids(answer, self._prompt + self._tokens[:begin])
        n_rows = len(self._prompt) + had + len(new) - 1
        experts = (
            None
            if kind is None
            else self._decode_routed_experts(meta, n_rows=n_rows, is_aborted=kind == "abort")
        )
        self._tokens += [token for _, token in new]
        self._log_probs += [log_prob for log_prob, _ in new]
        self._version, self._finish_reason = version, kind
        self._note_version(version, had)
        for span in meta.get("weight_versions") or ():
            self._note_version(str(span["version"]), begin + span["start"])
        if "cached_tokens" in meta:  # of the prompt, which the first request brought
            self._counters.setdefault("cached_tokens", meta["cached_tokens"])
        if "spec_verify_ct" in meta:  # of the request so far
            counts = {name: int(meta[theirs]) for name, theirs in _SPECULATION.items()}
            self._speculation[begin] = counts
        if kind is not None:
            self._timings = {name: float(meta[name]) for name in _TIMINGS if meta.get(name) is not None}
            self._routed_experts = experts

    def completion(self, version: str) -> Completion:
        """Return what arrived as a completion, with the finish reason `abort` where something is left.

        Args:
            version: of the weights, where no answer has told it.
        """
        reason = self._finish_reason or ("length" if self.is_over else "abort")
        end = self._stop_across()
        if end is not None:
            reason = "stop"
        spans = [
            (name, first, min(last, end or last))
            for name, first, last in self._spans
            if first < (end or last)
        ]
        versions = [{"version": name, "start": first, "end": last} for name, first, last in spans]
        return Completion(
            tokens=self._tokens[:end],
            log_probs=self._log_probs[:end],
            finish_reason=reason,
            weight_version=spans[-1][0] if spans else self._version or version,
            metadata={**self._counters, "timings": self._timings, "weight_versions": versions}
            | self._speculated()
            | self._routed_experts_metadata(end),
        )

    def _decode_routed_experts(
        self, meta: Mapping[str, Any], *, n_rows: int, is_aborted: bool
    ) -> NDArray[np.int16] | None:
        if self._experts_format is None:
            return None
        text = meta.get(ROUTED_EXPERTS)
        if text is not None:
            return self._experts_format.decode(text, n_rows=n_rows)
        if not is_aborted:
            raise ServerFaultError(
                "/generate: the experts of each token were asked for, and the answer has none"
            )
        return None

    def _speculated(self) -> dict[str, dict[str, int]]:
        requests = self._speculation.values()
        return (
            {"spec_info": {name: sum(each[name] for each in requests) for name in _SPECULATION}}
            if requests
            else {}
        )

    def _routed_experts_metadata(self, end: int | None) -> dict[str, NDArray[np.int16]]:
        if self._routed_experts is None:
            return {}
        n_rows = None if end is None else len(self._prompt) + end - 1
        return {ROUTED_EXPERTS: self._routed_experts[:n_rows]}

    def _truncate(self, n_tokens: int) -> None:
        """Drop all tokens after the first `n_tokens`."""
        del self._tokens[n_tokens:], self._log_probs[n_tokens:]
        self._spans = [
            (name, first, min(last, n_tokens)) for name, first, last in self._spans if first < n_tokens
        ]

    def _note_version(self, version: str, start: int) -> None:
        """Attribute the tokens from `start` on to a version of the weights."""
        spans = [(name, first, min(last, start)) for name, first, last in self._spans if first < start]
        if spans and spans[-1][0] == version:
            start = spans.pop()[1]
        if start < len(self._tokens):
            spans.append((version, start, len(self._tokens)))
        self._spans = spans

    def _stop_across(self) -> int | None:
        if self._tokenizer is None:
            return None
        ends = (
            stop_across(self._tokens, begin, self._params, self._tokenizer) for begin in self._begins if begin
        )
        return next((end for end in ends if end is not None), None)


async def ask(
    client: SglangClient,
    response: PartialResponse,
    *,
    stream: bool,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    experts_format: RoutedExpertsFormat | None = None,
    placeholder: int | None = None,
) -> None:
    """Have a server generate the rest of a response; with `stream` it keeps what arrived, whatever fails after.

    Raises:
        ServerFaultError: the server failed at it.
        EngineError: it refused it.
        DeadlineError: it took longer than `timeout_s` seconds.
    """
    body = response.request(stream=stream, experts_format=experts_format, placeholder=placeholder)
    await answer(client, response, body, timeout_s=timeout_s, headers=headers)


async def answer(
    client: SglangClient,
    response: PartialResponse,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send the response's last request, and have it take the answer; see `ask`."""
    if body["stream"]:
        await client.stream("/generate", body, response.take, timeout_s=timeout_s, headers=headers)
    else:
        response.take(
            await client.call(
                "POST", "/generate", body, timeout_s=timeout_s, headers=headers, flag=REQUEST_FLAG
            )
        )
    if not response.is_over:
        raise ServerFaultError(f"{client.url}/generate: the answer ended before the response did")


def _fields(
    answer: Any,
) -> tuple[Mapping[str, Any], list[int], list[tuple[float, int]], int, str, Mapping[str, Any] | None]:
    """Return what an answer of `/generate` holds: `meta_info`, ids, (log-prob, id) pairs, tokens of the whole request, version
    of the weights, and the finish reason, which has a `type`; None while the response is not over.

    Raises:
        ServerFaultError: it is not SGLang's.
        EngineError: a log-prob is no number.
    """
    try:
        meta, ids = answer["meta_info"], list(answer["output_ids"])
        triples = list(meta["output_token_logprobs"])
        if any(log_prob is None for log_prob, *_ in triples):  # as JSON has no NaN
            raise EngineError(
                "/generate: log-probs came that are no numbers; the server's weights or its numerics are broken"
            )
        drawn = [(float(log_prob), int(token)) for log_prob, token, *_ in triples]
        n_tokens, version, reason = (
            int(meta["completion_tokens"]),
            str(meta["weight_version"]),
            meta["finish_reason"],
        )
        if reason is not None:
            str(reason["type"])  # which must be there
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerFaultError(f"/generate: the answer is not SGLang's: {str(answer)[:300]}") from error
    return meta, ids, drawn, n_tokens, version, reason


def _refusal(error: Any) -> EngineError:
    code = error.get("code") if isinstance(error, Mapping) else None
    kind = ServerFaultError if not isinstance(code, int) or code >= 500 else EngineError
    return kind(f"/generate: the server gave the request up: {str(error)[:300]}")
