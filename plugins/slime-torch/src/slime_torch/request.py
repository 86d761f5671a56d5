"""One request: its prompt, what has been generated for it, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from slime_core.protocols import TOP_P_TOKENS, Completion, SamplingParams, Tokenizer

from slime_torch.sampling import Nucleus

#: Tokens decoded beyond those that can spell a stop string: the first of a tail may lose a leading space.
_SLACK = 4


class StopRule:
    """Says when a response is over.

    Args:
        params: of the request.
        tokenizer: decodes the tail of the response, where stop strings are looked for.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._params, self._tokenizer = params, tokenizer
        eos = tokenizer.eos_token_id
        self._ids = frozenset(params.stop_token_ids) | (frozenset() if eos is None else {eos})
        # A token that is text has at least one byte.
        self._window = max((len(stop.encode()) for stop in params.stop), default=0) + _SLACK

    def reason(self, tokens: Sequence[int]) -> str | None:
        """Return why the response `tokens` ends with its last token, or None if it goes on."""
        n = len(tokens)
        if n >= self._params.min_new_tokens:
            if tokens[-1] in self._ids:
                return "stop"
            if self._params.stop and self._spells_stop(tokens):
                return "stop"
        return "length" if n >= self._params.max_new_tokens else None

    def _spells_stop(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string; others may lie before `min_new_tokens`."""
        tail = tokens[-self._window :]
        text = self._decode(tail)
        if not any(stop in text for stop in self._params.stop):
            return False
        before = self._decode(tail[:-1])
        return any(text.rfind(stop) > before.rfind(stop) for stop in self._params.stop)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens)


class Request:
    """A request and its progress. Once submitted, only the scheduler's thread touches it, but for `cancelled`.

    Args:
        prompt: ids, at least one.
        params: how to sample.
        seed: of the request's random numbers.
        stop: says when it is over.
        future: told the completion or the error; opaque here.
    """

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, *, seed: int, stop: StopRule, future: Any = None
    ) -> None:
        self.prompt, self.params, self.seed, self.stop, self.future = (
            tuple(prompt),
            params,
            seed,
            stop,
            future,
        )
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self._nuclei: list[Nucleus] = []
        self.cached_tokens = 0
        """Prompt tokens whose keys and values were copied from another request."""
        self.hidden: Any = None
        """Hidden state after the prompt, for requests with the same prompt. None if it may not be shared."""
        self.cancelled = False
        self.finish_reason: str | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response so far."""
        return len(self.prompt) + len(self.tokens)

    def append(self, token: int, log_prob: float, nucleus: Nucleus = None) -> None:
        """Take the next token in, and note why if it is the last."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self._nuclei.append(nucleus)
        self.finish_reason = self.stop.reason(self.tokens)

    def completion(self, weight_version: str) -> Completion:
        """Return the answer of a finished request."""
        assert self.finish_reason is not None
        metadata: dict[str, Any] = {
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": len(self.prompt),
        }
        if any(nucleus is not None for nucleus in self._nuclei):
            nuclei = [np.empty(0, np.int32) if each is None else each for each in self._nuclei]
            offsets = np.cumsum([0, *map(len, nuclei)])
            metadata[TOP_P_TOKENS] = (np.concatenate(nuclei), offsets)
        return Completion(
            tokens=self.tokens,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            weight_version=weight_version,
            metadata=metadata,
        )
