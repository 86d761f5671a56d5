"""`Draft`: one response in the making, and what its requests and their answers look like to SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slime_core.errors import EngineError
from slime_core.protocols import Completion, SamplingParams, Tokenizer
from slime_core.rollout.continuation import params_after, stop_across

from slime_sglang.client import ServerFaultError, SglangClient
from slime_sglang.pictures import check_read, folded
from slime_sglang.routing import Routing
from slime_sglang.section import ROUTED_EXPERTS

#: Version of weights that SGLang says while it has those that it started with; and what we say before the first update.
UNSENT, NONE_SENT = "default", "initial"
#: Counters of speculative decoding: our name, and SGLang's of one request.
_SPECULATION = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
    "spec_verify_ct": "spec_verify_ct",
    "completion_token_num": "completion_tokens",
}
#: Seconds that SGLang measures of a request; `queue_time` only under --sglang-enable-metrics.
_TIMINGS = ("e2e_latency", "queue_time", "first_token_latency")


class Draft:
    """What has arrived of one response, by one request or, where engines were lost over it, by several.

    A further request goes on from the tokens that arrived. What is drawn by seed is what would have been drawn:
    SGLang's noise belongs to the seed and the position in the whole sequence.

    Args:
        prompt: ids.
        params: of the whole response.
        tokenizer: finds a stop string that two requests share; without one there may be one request only.
        images: of the prompt, as `data:` URLs; each request has them all.
        newest: version of the weights when it begins.
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
        self._routing: Routing | None = None
        self._routes: NDArray[np.int16] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to ask for."""
        is_full = len(self._tokens) >= self._params.max_new_tokens
        return self._finish_reason is not None or (is_full and self._routing is None)

    def reopen(self) -> None:
        """Have a response go on that was aborted."""
        if self._finish_reason == "abort":
            self._finish_reason = None

    def request(
        self, *, stream: bool, routing: Routing | None = None, placeholder: int | None = None
    ) -> dict[str, Any]:
        """Return the body of `/generate` for what is left; what is taken from now on answers it.

        Args:
            stream: have the tokens come as they are generated.
            routing: have the last answer say which experts each token passed, earlier ones included.
            placeholder: id that stands for images in the model's prompts; None where it sees none.

        Raises:
            EngineError: the model sees no images, or not one place among the ids stands for each.
        """
        assert self._tokenizer is not None or not self._begins, "a second request, and no tokenizer"
        self._routing = routing
        if (
            len(self._tokens) >= self._params.max_new_tokens
        ):  # all but the experts came: one token asks for them
            self._keep(self._params.max_new_tokens - 1)
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
            body["input_ids"] = folded(tokens, placeholder, n_images=len(self._images))
            body |= {"image_data": self._images, "return_prompt_token_ids": True}
        return body if routing is None else body | {"return_routed_experts": True}

    def take(self, answer: Any) -> None:
        """Add what an answer of the last request brings, or an event of it.

        The tokens are those since the event before, or all of the request. Tokens of an event that spans an update of
        the weights count to the later version, until the last event gives the exact places.

        Raises:
            ServerFaultError: it is not SGLang's, does not follow what there is, or says that the server is at fault.
            EngineError: the server refused the request.
        """
        if isinstance(answer, Mapping) and "error" in answer:
            raise _refusal(answer["error"])
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
            kind = None if reason is None else str(reason["type"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFaultError(f"/generate: the answer is not SGLang's: {str(answer)[:300]}") from error
        if kind == "abort" and reason.get("status_code"):
            raise _refusal({"code": reason["status_code"], "message": reason.get("message")})
        if version == UNSENT and self._newest != NONE_SENT:
            raise EngineError(
                f"/generate: the server has the weights that it started with, and should have version {self._newest}; "
                "somebody started it anew: start the run again, which resumes"
            )
        begin, had = self._begins[-1], len(self._tokens)
        told = [token for _, token in drawn]
        new = drawn[had - begin :] if len(drawn) == n_tokens else drawn
        # SGLang 0.5.23 repeats the last id where a request is aborted while it waits (tokenizer_manager.py).
        if had - begin + len(new) != n_tokens or (ids != told and (new or ids != told[-1:])):
            raise ServerFaultError(
                f"/generate: found {len(ids)} ids and {len(drawn)} log-probs after {had - begin} tokens of {n_tokens}"
            )
        if self._images and (
            n_tokens or kind != "abort"
        ):  # it may be aborted before the server reads the prompt
            check_read(answer, self._prompt + self._tokens[:begin])
        n_rows = len(self._prompt) + had + len(new) - 1
        routes = None if kind is None else self._routes_in(meta, n_rows=n_rows, is_aborted=kind == "abort")
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
            self._routes = routes

    def completion(self, version: str) -> Completion:
        """Return what there is; `abort` where something is left.

        Args:
            version: of the weights, where nothing has arrived that tells it.
        """
        reason = self._finish_reason or ("length" if self.is_over else "abort")
        end = self._stop_across()
        if end is not None:
            reason = "stop"
        spans = [
            {"version": name, "start": first, "end": min(last, end or last)}
            for name, first, last in self._spans
            if first < (end or last)
        ]
        return Completion(
            tokens=self._tokens[:end],
            log_probs=self._log_probs[:end],
            finish_reason=reason,
            weight_version=spans[-1]["version"] if spans else self._version or version,
            metadata={**self._counters, "timings": self._timings, "weight_versions": spans}
            | self._speculated()
            | self._routed(end),
        )

    def _routes_in(
        self, meta: Mapping[str, Any], *, n_rows: int, is_aborted: bool
    ) -> NDArray[np.int16] | None:
        if self._routing is None:
            return None
        text = meta.get(ROUTED_EXPERTS)
        if text is not None:
            return self._routing.decode(text, n_rows=n_rows)
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

    def _routed(self, end: int | None) -> dict[str, NDArray[np.int16]]:
        if self._routes is None:
            return {}
        n_rows = None if end is None else len(self._prompt) + end - 1
        return {ROUTED_EXPERTS: self._routes[:n_rows]}

    def _keep(self, n_tokens: int) -> None:
        """Forget all tokens but the first so many."""
        del self._tokens[n_tokens:], self._log_probs[n_tokens:]
        self._spans = [
            (name, first, min(last, n_tokens)) for name, first, last in self._spans if first < n_tokens
        ]

    def _note_version(self, version: str, start: int) -> None:
        """Count the tokens from `start` on to a version, whatever they counted to before."""
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
    draft: Draft,
    *,
    stream: bool,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    routing: Routing | None = None,
    placeholder: int | None = None,
) -> None:
    """Ask a server for the rest of a response; with `stream` the draft has what arrived, whatever happens then.

    Raises:
        ServerFaultError: the server failed at it.
        EngineError: it refused it.
        DeadlineError: it took longer than `timeout_s` seconds.
    """
    body = draft.request(stream=stream, routing=routing, placeholder=placeholder)
    await answer(client, draft, body, timeout_s=timeout_s, headers=headers)


async def answer(
    client: SglangClient,
    draft: Draft,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send the draft's last request, and have it take the answer; see `ask`."""
    if body["stream"]:
        await client.stream("/generate", body, draft.take, timeout_s=timeout_s, headers=headers)
    else:
        draft.take(await client.call("POST", "/generate", body, timeout_s=timeout_s, headers=headers))
    if not draft.is_over:
        raise ServerFaultError(f"{client.url}/generate: the answer ended before the response did")


def _refusal(error: Any) -> EngineError:
    code = error.get("code") if isinstance(error, Mapping) else None
    kind = ServerFaultError if not isinstance(code, int) or code >= 500 else EngineError
    return kind(f"/generate: the server gave the request up: {str(error)[:300]}")
