"""The protocol `RolloutEngine`, and its requests and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slime_core.protocols.capabilities import EngineCapabilities
from slime_core.protocols.transfer import Fingerprint, TransferPlan

if TYPE_CHECKING:
    from slime_core.samples.compact import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    """Most tokens to generate, at least 1."""
    min_new_tokens: int = 0
    """No stop condition applies before this many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = -1
    """Keep this many of the most likely tokens; -1 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; the tokens that spell them stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the response, besides the tokenizer's end-of-sequence id; they stay in it."""
    seed: int | None = None
    """Same seed, prompt and weights: same response. None draws one."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the decoded text."""


#: The kind of media that engines take: its key in `Sample.multimodal_inputs`.
IMAGE = "image"
#: Key of `Completion.metadata` for sampling masks: the ids that top-p and top-k left to draw from.
TOP_P_TOKENS = "top_p_tokens"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine answers to one request."""

    tokens: Ints
    """Generated ids, without the prompt: a list, or better a `Compact` column, which saves the run's time and memory."""
    log_probs: Floats
    """Natural log-prob of each id under the distribution it was sampled from: temperature, top-p and top-k applied;
    without temperature if greedy."""
    finish_reason: str
    """`stop`, `length` or `abort` (partial output)."""
    weight_version: str
    """Version of the weights that generated it; the last one if they changed meanwhile."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the engine reports of the request, besides counters such as `cached_tokens`:

    - `timings`: name -> seconds (`e2e_latency`, `queue_time`, `first_token_latency`).
    - `spec_info`: with speculative decoding, the counters of `Sample.spec_info`.
    - `replica`: the name of the replica that generated it, of several; the last one where it moved.
    - `weight_versions`: if the weights changed meanwhile, a list of spans in order, each with the `version` of the
      generated tokens from `start` to before `end`.
    - `routed_experts`, if it is in `BuildContext.engine_needs`: integers [prompt + completion tokens - 1, num_layers,
      topk], the experts that each token was routed to.
    - `top_p_tokens`, if it is in `BuildContext.engine_needs`: the sampling masks, as (ids flat over all tokens, offsets
      [tokens + 1]); a token without ids was drawn from the whole vocabulary.
    """


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is, as it last counted it."""

    kv_cache_usage: float = 0.0
    """Share of its KV cache that holds tokens of running requests, from 0 to 1; of several servers that of the fullest."""
    running: int = 0
    """Requests that it generates tokens for."""
    queued: int = 0
    """Requests that it has, and that wait: they have just arrived, or there is no room for them."""
    retractions: int = 0
    """How often, since the start, it has put a running request back into the queue for want of room; never falls."""
    replicas: int = 1
    """Servers that it is of."""


class Generates(Protocol):
    """Token ids in, token ids and log-probs out: the part of an engine that generators see."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`. Many calls may be in flight at once.

        Args:
            tokens: ids of the prompt, and of the response so far if it is continued.
            params: how to sample.
            session_id: requests of one session go to the same server, if its load allows, and share its prefix cache.
            images: paths or `data:` URLs, one for each run of placeholders among `tokens`; only for an engine whose
                capabilities have images.
        """


@runtime_checkable
class RolloutEngine(Generates, Protocol):
    """Generates responses, and receives weight updates."""

    capabilities: EngineCapabilities
    """What it can do; the same before `start` and after."""

    async def start(self) -> None:
        """Load the model and get ready to generate."""

    async def abort(self) -> None:
        """End every request in flight; each returns its partial output with finish reason `abort`."""

    async def pause(self) -> None:
        """Stop generating, and keep the requests in flight until `resume`."""

    async def resume(self) -> None:
        """Continue the requests in flight after `pause`."""

    async def offload(self) -> None:
        """Release device memory, weights included; only `onload` and `close` may follow."""

    async def onload(self) -> None:
        """Allocate device memory again; weights come with the next update."""

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Return the plan of a weight update to `version` by `transport`, one of `capabilities.transports`."""

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Receive the update, load it in place, and return the fingerprints of the weights that the engine now holds.

        Raises:
            WeightSyncError: a tensor is unknown, missing or of another shape; the message names it. The engine does not
                report the plan's version then.
        """

    async def close(self) -> None:
        """Stop, and free everything. May be called twice."""


class AsksForWeights(Protocol):
    """What an engine whose capabilities have `asks_for_weights` does besides."""

    async def weights_wanted(self, version: str) -> None:
        """Wait until an update to `version`, the trainer's weights as they are, would have a server generate that waits for weights.

        Such a server came after the last update, which nobody staged. While others generate by other weights than the trainer's,
        it waits for the next update.
        """


class ReportsLoad(Protocol):
    """What an engine whose capabilities have `reports_load` does besides."""

    async def current_load(self) -> EngineLoad:
        """Return how busy it is. May be called from `start` to `close`, also while it is paused or has given up its memory.

        Raises:
            EngineError: it is not started, closed, or has failed.
            DeadlineError: it did not answer in time.
        """
