"""Continuous batching: which requests run in which slots, and one step of all of them. Synchronous code."""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.protocols import EngineLoad
from slime_models.upload import upload
from torch import Tensor

from slime_torch.generation.recorded_steps import RecordedSteps
from slime_torch.generation.request import Request
from slime_torch.generation.sampling import Draws, SamplingMask, sample
from slime_torch.layers.part import Routes
from slime_torch.model.decoder import Decoder
from slime_torch.storage.cache import Cache

log = logging.getLogger(__name__)


class Scheduler:
    """Requests that wait and requests that run; running ones fill the first slots of the cache, without holes.

    A request begins when the cache has room for it, and one page more for each running one that may need more. Where there is no room
    left for a next token, those that came last are put back in front of the queue, and are prefilled again with what they have.

    Args:
        model: with its weights.
        cache: of the same model.
        max_running: most requests that run at once.
        max_prefill_tokens: most tokens of a prefill batch, unless one prompt is longer.
        with_sampling_masks: whether requests record the ids that top-k and top-p kept for each token.
        with_routes: whether requests record the experts that each token was routed to.
        steps: computes decoding steps; the model does when not given. Not beside routes.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        *,
        max_running: int,
        max_prefill_tokens: int,
        with_sampling_masks: bool = False,
        with_routes: bool = False,
        steps: RecordedSteps | None = None,
    ) -> None:
        self._model, self._cache, self._steps = model, cache, steps
        self._max_running, self._max_prefill_tokens = max_running, max_prefill_tokens
        self._with_sampling_masks = with_sampling_masks
        self._with_routes = with_routes and bool(model.architecture.moe_layers)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._finished: list[Request] = []
        self.version = "initial"
        """Of the weights."""
        self._n_submitted = self._n_retracted = 0
        self._drawn_for: list[Request] = []
        self._draws: Draws | None = None

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def current_load(self) -> EngineLoad:
        """Return how busy it is."""
        return EngineLoad(
            kv_cache_usage=self._cache.usage,
            running=len(self.running),
            queued=len(self.waiting),
            retractions=self._n_retracted,
        )

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in order."""
        for request in requests:
            request.number = self._n_submitted = self._n_submitted + 1
            self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Fill free slots, and give every running request its next token; returns those that finished.

        Where it raises, `take_finished` has those that had finished by then.
        """
        self._drop_cancelled()
        self._admit()
        self._finished += self._leave()
        if self.running:
            self._make_room()
            tokens = np.array([request.tokens[-1] for request in self.running])
            lengths = np.array(
                [request.length - 1 for request in self.running]
            )  # the newest is not there yet
            if self._steps is not None and not self._with_routes:
                draws = self._draws_of(self.running, lengths + 1)
                drawn = self._steps.next_tokens(
                    tokens, lengths, draws, with_sampling_masks=self._with_sampling_masks
                )
                self._append(self.running, *drawn)
            else:
                self._decode(tokens, lengths)
            self._finished += self._leave()
        return self.take_finished()

    def take_finished(self) -> list[Request]:
        """Return the requests that finished since this was last asked."""
        finished, self._finished = self._finished, []
        return finished

    def _decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Give running requests their next tokens, by a step that is not recorded."""
        routes = self._new_routes()
        ids, held = (upload(each, self._model.device) for each in (tokens, lengths))
        hidden = self._model.decode(ids, held, self._cache, routes=routes)
        if routes is not None:
            for request, row in zip(self.running, self._routes_of_all(routes), strict=True):
                request.take_routes(row[None], since=request.length - 1)
        self._sample(hidden, self.running, lengths + 1)

    def abort(self) -> list[Request]:
        """Take every request out, finished by `abort` with what it has."""
        requests = self.clear()
        for request in requests:
            request.finish_reason = "abort"
        return requests

    def clear(self) -> list[Request]:
        """Take every request out."""
        requests = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self._cache.clear()
        return requests

    def recover(self) -> list[Request]:
        """Take every request out after a step that failed, and free the cache: what is hidden by a mask must be finite there."""
        requests = self.clear()
        self._cache.free()
        return requests

    def retract(self) -> None:
        """Put the running requests back in front of the queue, to be prefilled anew with what they have."""
        self.forbid_sharing()
        self.waiting.extendleft(sorted(self.running, key=lambda request: -request.number))
        self.running = []
        self._cache.clear()

    def forbid_sharing(self) -> None:
        """Share no prompt that was prefilled before now: the weights have changed."""
        if self._steps is not None:
            self._steps.look_at_weights()
        for request in self.running:
            request.hidden = None

    def _drop_cancelled(self) -> None:
        if any(request.cancelled for request in (*self.running, *self.waiting)):
            self.waiting = deque(request for request in self.waiting if not request.cancelled)
            self._keep(lambda request: not request.cancelled)

    def _leave(self) -> list[Request]:
        finished = [request for request in self.running if request.finish_reason is not None]
        if finished:
            self._keep(lambda request: request.finish_reason is None)
        return finished

    def _keep(self, wanted: Callable[[Request], bool]) -> None:
        """Keep some running requests, and fill the holes with the last ones."""
        running, slot = self.running, 0
        while slot < len(running):
            if wanted(running[slot]):
                slot += 1
                continue
            self._cache.release(slot)
            last = running.pop()
            if slot < len(running):
                self._cache.move(len(running), slot)
                running[slot] = last

    def _make_room(self) -> None:
        """Give each running request room for its newest token, and put back those that came last where there is not enough."""
        while not self._cache.has_room([request.length for request in self.running]):
            last = max(self.running, key=lambda request: request.number)
            last.hidden = None
            self._keep(partial(operator.is_not, last))
            self.waiting.appendleft(last)
            if not self._n_retracted:
                log.warning(
                    "the KV cache of %d tokens is full: requests are put back and prefilled again; fewer at a time "
                    "(--rollout-concurrency, --torch-max-running-requests), or a larger --torch-max-total-tokens",
                    self._cache.max_tokens,
                )
            self._n_retracted += 1
        for slot, request in enumerate(self.running):
            self._cache.hold(slot, request.length)
        self._cache.reserve(len(self.running))

    def _admit(self) -> None:
        """Move waiting requests into free slots while there is room: prefill each context once, and share it with its twins."""
        first = len(self.running)
        if not self.waiting or first == self._max_running:
            return
        spare, length = sum(map(self._may_grow, range(first))), self.waiting[0].length
        if not self._cache.fits(length + 1, shared=length, spare=spare):  # even if another had its context
            return
        sources = self._begun() if self._cache.has_prefixes else {}
        to_prefill: dict[int, tuple[int, ...]] = {}
        twins: list[tuple[int, int, tuple[int, int] | None]] = []
        while self.waiting and len(self.running) < self._max_running:
            request, slot = self.waiting[0], len(self.running)
            source, length = sources.get(request.context), request.length
            shared = 0 if source is None else length
            if not self._cache.fits(length + 1, shared=shared, spare=spare):
                break
            self.running.append(self.waiting.popleft())
            if source is None:
                sources[request.context], to_prefill[slot] = slot, request.context
            else:
                twins.append((source, slot, self._cache.share(source, slot, length)))
            self._cache.hold(slot, length + 1)
            spare += self._may_grow(slot)
        new = self.running[first:]
        if not new:
            return
        self._cache.reserve(len(self.running))
        hidden = self._prefill(to_prefill)
        for source, slot, page in twins:
            self._cache.copy(source, slot, page)
            hidden[slot] = self._take_over(source, slot, hidden)
        for slot, request in enumerate(new, start=first):
            request.hidden = None if request.tokens else hidden[slot]
        states = torch.stack([hidden[slot] for slot in range(first, len(self.running))])
        self._sample(states, new, np.array([request.length for request in new]))

    def _may_grow(self, slot: int) -> bool:
        """Return whether the request of a slot may need more pages than it has."""
        return not self._cache.has_room_in(slot, self.running[slot].max_length)

    def _begun(self) -> dict[tuple[int, ...], int]:
        """Return prompt -> slot of a running request whose prompt may be shared."""
        return {
            request.prompt: slot for slot, request in enumerate(self.running) if request.hidden is not None
        }

    def _take_over(self, source: int, target: int, hidden: dict[int, Tensor]) -> Tensor:
        """Give a slot what is known of the context of a slot that holds it already; returns its hidden state."""
        request = self.running[target]
        state: Tensor = hidden[source] if source in hidden else self.running[source].hidden
        if (routes := self.running[source].routes) is not None:
            request.take_routes(routes, since=0)
        request.cached_tokens += request.length
        return state

    def _prefill(self, contexts: dict[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """Prefill contexts (slot -> ids), those of one length together; returns slot -> hidden state."""
        hidden: dict[int, Tensor] = {}
        batch: list[int] = []
        n_tokens = 0
        for slot in sorted(contexts, key=lambda slot: (len(contexts[slot]), slot)):
            if batch and n_tokens + len(contexts[slot]) > self._max_prefill_tokens:
                hidden |= self._prefill_batch(batch, contexts)
                batch, n_tokens = [], 0
            batch.append(slot)
            n_tokens += len(contexts[slot])
        return hidden | self._prefill_batch(batch, contexts) if batch else hidden

    def _prefill_batch(self, slots: list[int], contexts: dict[int, tuple[int, ...]]) -> dict[int, Tensor]:
        routes = self._new_routes()
        prompts = [contexts[slot] for slot in slots]
        states = self._model.prefill(prompts, slots, self._cache, routes=routes)
        if routes is not None:
            ends = np.cumsum([len(prompt) for prompt in prompts])
            for slot, rows in zip(slots, np.split(self._routes_of_all(routes), ends[:-1]), strict=True):
                self.running[slot].take_routes(rows, since=0)
        return dict(zip(slots, states.unbind(0), strict=True))

    def _new_routes(self) -> Routes | None:
        return [] if self._with_routes else None

    def _routes_of_all(self, routes: Routes) -> NDArray[np.int16]:
        """Return the experts of each token [tokens, layers, top_k], zeros in layers without; the host waits for them."""
        a = self._model.architecture
        found = torch.stack(routes, dim=1).to(torch.int16).cpu().numpy()
        every = np.zeros((len(found), a.num_layers, found.shape[2]), np.int16)
        every[:, list(a.moe_layers)] = found
        return every

    def _sample(self, hidden: Tensor, requests: Sequence[Request], positions: NDArray[np.int64]) -> None:
        """Give requests their next tokens, which come at these positions."""
        logits, draws = self._model.logits(hidden), self._draws_of(requests, positions)
        self._append(requests, *sample(logits, draws, with_sampling_masks=self._with_sampling_masks))

    def _draws_of(self, requests: Sequence[Request], positions: NDArray[np.int64]) -> Draws:
        if self._draws is None or self._drawn_for != requests:
            params, seeds = [each.params for each in requests], [each.seed for each in requests]
            self._drawn_for, self._draws = list(requests), Draws.of(params, seeds, positions.tolist())
        return self._draws.at(positions)

    def _append(
        self,
        requests: Sequence[Request],
        tokens: Sequence[int],
        log_probs: Sequence[float],
        sampling_masks: Sequence[SamplingMask],
    ) -> None:
        if not math.isfinite(sum(log_probs)):  # they are on the host, which need not wait for logits
            wrong = [i for i, value in enumerate(log_probs) if not math.isfinite(value)]
            first = requests[wrong[0]]
            raise ArithmeticError(
                f"the logits of {len(wrong)} of {len(requests)} requests are not finite (the first is at token {first.length}), with "
                f"the weights of version {self.version}; look for NaN in the weights of the model, or of the last update"
            )
        for request, token, log_prob, mask in zip(requests, tokens, log_probs, sampling_masks, strict=True):
            request.append(token, log_prob, mask, version=self.version)
