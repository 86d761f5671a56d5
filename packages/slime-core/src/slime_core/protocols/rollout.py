"""The signatures of generators, filters and rollout functions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import SampleError
from slime_core.protocols.capabilities import EngineCapabilities
from slime_core.protocols.continuation import params_after
from slime_core.protocols.engine import Generates, SamplingParams
from slime_core.protocols.tokenizer import Tokenizer
from slime_core.protocols.turn import append_completion, request, text_after, until_stop
from slime_core.runtime.clock import now

if TYPE_CHECKING:
    from slime_core.samples import Sample


@dataclass(frozen=True, kw_only=True)
class GenerateContext:
    """What a generator may use."""

    engine: Generates
    """Answers `abort` when the rollout has all that it needs; then the sample is to be returned as ABORTED, as far as it is."""
    tokenizer: Tokenizer
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """What the engine can do."""
    evaluation: bool = False
    max_context_len: int | None = None
    """Most tokens of prompt and response, by the settings and the engine; None where neither says."""
    services: dict[str, Any] = field(default_factory=dict)
    """What plugins started for the run and share, by a name of theirs; closed with it (`close`)."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the rollout has all that it needs: what is at work without the engine may end, its sample be returned as ABORTED."""

    async def turn(self, sample: Sample, params: SamplingParams) -> str:
        """Generate one turn, or what is missing of one that was aborted, and append it to the sample with its bookkeeping.

        That is tokens, text, log-probs, a loss mask of 1, sampling masks, routed experts, weight versions, timings and
        counters, and the status that follows from how it ended. Where no token is left to generate, nothing is asked and the
        status is TRUNCATED.

        Args:
            sample: pending, aborted, or completed by an earlier turn.
            params: of the whole response; see `remaining`.

        Returns:
            The text of the turn, its part from before an abort included.

        Raises:
            SampleError: the sample is finished, has no prompt ids, or carries media that the engine does not take.
        """
        if sample.status in ("truncated", "failed"):
            raise SampleError(f"{sample.name}: status is {sample.status}; wanted one that a turn may follow")
        if not sample.tokens:
            raise SampleError(
                f"{sample.name}: has no prompt ids; set --apply-chat-template, or choose a generator that "
                "renders chat messages"
            )
        skip = params.skip_special_tokens
        left = self.remaining(sample, params)
        if left.max_new_tokens < 1:
            sample.append_response([], finish_reason="length")
            response, begin = sample.response_tokens, sample.turn_begin
            return text_after(response[:begin], response[begin:], self.tokenizer, skip_special_tokens=skip)
        completion = await request(self.engine, self.capabilities, sample, left)
        completion = until_stop(completion, sample, params, self.tokenizer)
        return append_completion(sample, completion, self.tokenizer, skip_special_tokens=skip)

    def append(
        self,
        sample: Sample,
        content: str | Sequence[int],
        *,
        trainable: bool = False,
        text: str | None = None,
    ) -> None:
        """Append what the policy did not generate: an environment's text or token ids, with a loss mask of 0.

        Log-probs of these tokens are 0.0, and their sampling masks empty. Routed experts repeat those of the last token.

        Args:
            sample: to append to.
            content: text, which is encoded once and without special tokens around it; or ids, which are taken as they are.
            trainable: give the tokens a loss mask of 1; refused where others have log-probs.
            text: what ids spell, if that is known; they are decoded otherwise.
        """
        ids = self.tokenizer.encode(content) if isinstance(content, str) else [int(one) for one in content]
        if isinstance(content, str):
            text = content
        elif text is None:
            text = text_after(sample.response_tokens, ids, self.tokenizer, skip_special_tokens=False)
        sample.append_response(ids, trainable=trainable, text=text)

    def remaining(self, sample: Sample, params: SamplingParams) -> SamplingParams:
        """Return how to sample what follows: less the tokens that the policy generated, and within the context.

        `max_new_tokens` may come out below 1. Tokens that were put in count for the context alone.
        """
        left = params_after(params, sample.generated_length)
        if self.max_context_len is None:
            return left
        room = self.max_context_len - len(sample.tokens)
        return dataclasses.replace(left, max_new_tokens=min(left.max_new_tokens, room))

    @contextlib.contextmanager
    def outside_engine(self, sample: Sample) -> Iterator[None]:
        """Count the time of the block as time that the sample spends in tools and environments."""
        begin = now()
        try:
            yield
        finally:
            sample.non_generation_time += now() - begin


class GenerateFn(Protocol):
    """Turns a pending sample into a finished one, or one execution into several samples."""

    def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Awaitable[Sample | list[Sample]]:
        """Generate. `sample.tokens` holds the prompt ids, and earlier response ids when it is resumed."""


def rendering_prompt[F: Callable[..., Any]](generator: F) -> F:
    """Mark a generator, a function or a class, that renders prompts itself: the prompt ids that a sample comes with are not
    those that it comes back with."""
    generator.renders_prompt = True  # type: ignore[attr-defined]  # functions and classes take attributes
    return generator


def renders_prompt(generator: Callable[..., Any]) -> bool:
    """Return whether a generator is marked as one that renders prompts itself."""
    return bool(getattr(generator, "renders_prompt", False))


class WeakReason(str):
    """A reason to drop a group as long as enough others are left: one that would have to be replaced by sampling again is
    kept. The reference system calls it `keep_when_insufficient`."""

    __slots__ = ()


#: Async `(run, step, source) -> groups by the name of their evaluation set`, or that and metrics: a whole evaluation.
EvalFn = Callable[..., Awaitable[Any]]
#: (group) -> None to keep it, or the reason to drop it: text, or a `WeakReason`
GroupFilter = Callable[..., str | None]
