"""Continuous batching: which requests run in which slots, and one step of all of them. Synchronous code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.protocols import EngineLoad
from slime_models.upload import upload
from torch import Tensor

from slime_torch.generation.request import Request
from slime_torch.generation.sampling import Draw, sample
from slime_torch.layers.part import Routes
from slime_torch.model.decoder import Decoder
from slime_torch.storage.cache import Cache


class Scheduler:
    """Requests that wait and requests that run; running ones fill the first slots of the cache, without holes.

    Args:
        model: with its weights.
        cache: of the same model.
        max_running: most requests that run at once.
        max_prefill_tokens: most tokens of a prefill batch, unless one prompt is longer.
        with_sampling_masks: whether requests record the ids that top-k and top-p kept for each token.
        with_routes: whether requests record the experts that each token was routed to.
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
    ) -> None:
        self._model, self._cache = model, cache
        self._max_running, self._max_prefill_tokens = max_running, max_prefill_tokens
        self._with_sampling_masks = with_sampling_masks
        self._with_routes = with_routes and bool(model.architecture.moe_layers)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.version = "initial"
        """Of the weights."""

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def current_load(self, longest: int) -> EngineLoad:
        """Return how busy it is, by the tokens that its slots would hold if each had `longest`."""
        held = sum(request.length for request in self.running)
        usage = held / (self._max_running * longest)
        return EngineLoad(kv_cache_usage=usage, running=len(self.running), queued=len(self.waiting))

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in order."""
        self.waiting.extend(requests)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Fill free slots, and give every running request its next token; returns those that finished."""
        self._drop_cancelled()
        self._admit()
        finished = self._leave()
        if self.running:
            lengths = [
                request.length - 1 for request in self.running
            ]  # the newest token is not in the cache yet
            self._cache.reserve(len(self.running), max(lengths) + 1)
            device = self._model.device
            tokens = upload(np.array([request.tokens[-1] for request in self.running]), device)
            routes = self._new_routes()
            hidden = self._model.decode(tokens, upload(np.array(lengths), device), self._cache, routes=routes)
            if routes is not None:
                for request, row in zip(self.running, self._routes_of_all(routes), strict=True):
                    request.take_routes(row[None], since=request.length - 1)
            self._sample(hidden, self.running)
            finished += self._leave()
        return finished

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
        return requests

    def retract(self) -> None:
        """Put the running requests back in front of the queue, to be prefilled anew with what they have."""
        for request in self.running:
            request.hidden = None
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    def forbid_sharing(self) -> None:
        """Share no prompt that was prefilled before now: the weights have changed."""
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
        running = self.running
        slot = 0
        while slot < len(running):
            if wanted(running[slot]):
                slot += 1
                continue
            last = running.pop()
            if slot < len(running):
                if wanted(last):
                    self._cache.copy(len(running), slot, last.length - 1)
                running[slot] = last

    def _admit(self) -> None:
        """Move waiting requests into free slots: prefill each context once, and copy it to its twins."""
        n = min(len(self.waiting), self._max_running - len(self.running))
        if n == 0:
            return
        new = [self.waiting.popleft() for _ in range(n)]
        longest = max(request.length for request in (*self.running, *new))
        self._cache.reserve(len(self.running) + n, longest + 1)
        donors = {}
        if self._cache.has_prefixes:
            donors = {
                request.prompt: slot
                for slot, request in enumerate(self.running)
                if request.hidden is not None
            }
        first = len(self.running)
        self.running += new
        twins: dict[tuple[int, ...], list[int]] = {}
        for slot, request in enumerate(new, start=first):
            twins.setdefault(request.context, []).append(slot)
        hidden: dict[int, Tensor] = {}
        to_prefill = {}
        for context, slots in twins.items():
            donor = donors.get(context)
            if donor is None:
                to_prefill[slots[0]] = context
            else:
                self._share(donor, slots, self.running[donor].hidden, hidden)
        for slot, state in self._prefill(to_prefill).items():
            slots = twins[to_prefill[slot]]
            self._share(slot, slots[1:], state, hidden)
            hidden[slot] = state
        for slot, request in enumerate(new, start=first):
            request.hidden = None if request.tokens else hidden[slot]
        self._sample(torch.stack([hidden[slot] for slot in range(first, first + n)]), new)

    def _share(self, source: int, targets: list[int], state: Tensor, hidden: dict[int, Tensor]) -> None:
        """Give slots the context of a slot that holds it already."""
        shared = self.running[source].routes
        for target in targets:
            if shared is not None:
                self.running[target].take_routes(shared, since=0)
            length = self.running[target].length
            self._cache.copy(source, target, length)
            self.running[target].cached_tokens += length
            hidden[target] = state

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

    def _sample(self, hidden: Tensor, requests: list[Request]) -> None:
        draws = [Draw(request.params, request.seed, request.length) for request in requests]
        drawn = sample(self._model.logits(hidden), draws, with_sampling_masks=self._with_sampling_masks)
        for request, token, log_prob, sampling_mask in zip(requests, *drawn, strict=True):
            request.append(token, log_prob, sampling_mask, version=self.version)
