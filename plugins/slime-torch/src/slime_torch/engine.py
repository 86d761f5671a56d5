"""Engine `torch`: `RolloutEngine` in this process, in plain PyTorch."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import torch
from slime_core.cli.machine import memory_bytes
from slime_core.errors import EngineError
from slime_core.protocols import (
    Completion,
    EngineLoad,
    Fingerprint,
    SamplingParams,
    Tokenizer,
    TransferPlan,
)
from slime_core.weights.sync import Bucket, MemoryChannel
from slime_models.cpu import multiplies_bfloat16
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.quantization.reading import open_weights
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.staging import StagedUpdate

from slime_torch.generation.recorded_steps import RecordedSteps, can_record
from slime_torch.generation.request import Request, StopRule, check_request
from slime_torch.generation.scheduler import Scheduler
from slime_torch.generation.update import WeightUpdate, staged_buckets
from slime_torch.generation.worker import Worker
from slime_torch.model.decoder import Decoder
from slime_torch.section import CAPABILITIES, TorchSection

#: Turns of the event loop for which new requests are gathered before the worker gets them, all together.
_SETTLE_TURNS = 4

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchEngine:
    """Generates in a worker thread, with continuous batching.

    The same calls in the same turn of the event loop form the same batches, whatever the machine's timing.
    All methods must be called on the event loop that `start` ran on.

    Args:
        model_path: Hugging Face folder.
        family: of the model.
        tokenizer: gives the end-of-sequence id, and decodes where stop strings are looked for.
        dtype: storage and compute dtype.
        section: the engine's settings.
        receiver: of weight updates; None where there are none.
        with_sampling_masks: whether completions hold the ids that top-k and top-p kept for each token (`top_p_tokens`).
        with_routes: whether completions hold the experts that each token was routed to (`routed_experts`).
        keeps_cache: whether requests in flight keep their KV cache at a weight update, instead of recomputing it.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        model_path: Path,
        family: ModelFamily,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        section: TorchSection,
        receiver: UpdateReceiver | None = None,
        with_sampling_masks: bool = False,
        with_routes: bool = False,
        keeps_cache: bool = False,
    ) -> None:
        self._with_sampling_masks, self._with_routes = with_sampling_masks, with_routes
        self._keeps_cache = keeps_cache
        self._path, self._family, self._tokenizer = model_path, family, tokenizer
        self._dtype, self._section = dtype, section
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.architecture = family.architecture(read_config(model_path))
        self.max_context_len = context_len(section, self.architecture)
        self.weight_version = "initial"
        self._state = "not started"
        self._mixture: str | None = None
        self._receiver = receiver
        self._turns = self._delivered = 0
        self._fresh: list[Request] = []
        self._pending: set[Request] = set()

    async def start(self) -> None:
        """Load the model and start the worker thread.

        Raises:
            CheckpointError: the folder's weights are not those of its config.json.
            EngineError: the model has tensors that its layers have no use for.
        """
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(self._loop, self._deliver)
        try:
            await self._worker.call(self._load)
        except BaseException:
            self._worker.end()
            raise
        self._state = "ready"

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`.

        Raises:
            EngineError: the request cannot be served (says why), or the step that served it failed.
        """
        if images:
            raise EngineError(
                f"torch engine: found {len(images)} images; wanted none, it generates from text alone"
            )
        self._check_state("ready")
        if self._mixture is not None:
            raise EngineError(f"torch engine: {self._mixture}")
        check_request(
            tokens, params, max_context_len=self.max_context_len, vocab_size=self.architecture.vocab_size
        )
        request = Request(
            tokens,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop=StopRule(params, self._tokenizer),
            future=self._loop.create_future(),
        )
        self._pending.add(request)
        self._fresh.append(request)
        self._gather()
        try:
            completion: Completion = await request.future
        except asyncio.CancelledError:
            request.cancelled = True
            raise
        finally:
            self._pending.discard(request)
        return completion

    async def current_load(self) -> EngineLoad:
        """Return how busy it is, between two steps."""
        if self._state not in ("ready", "offloaded"):
            self._check_state("ready")
        load: EngineLoad = await self._worker.call(self._scheduler.current_load)
        return load

    async def abort(self) -> None:
        """End every request in flight; each answers with its partial output and `abort`."""
        self._check_state("ready")
        self._hand_over()
        await self._worker.call(lambda: self._worker.finish(self._scheduler.abort()))

    async def pause(self) -> None:
        """Stop generating after the current token, and keep the requests in flight."""
        self._check_state("ready")
        await self._worker.call(lambda: self._worker.hold("pause"))

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._check_state("ready")
        await self._worker.call(lambda: self._worker.release("pause"))

    async def offload(self) -> None:
        """Free the KV cache and move the weights to the host; after `onload` requests in flight are prefilled again."""
        self._check_state("ready")
        self._state = "offloaded"

        def leave() -> None:
            self._worker.hold("offload")
            self._scheduler.retract()
            self._cache.free()
            self.model.weights.move(torch.device("cpu"))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

        await self._worker.call(leave)

    async def onload(self) -> None:
        """Move the weights back to the device."""
        self._check_state("offloaded")

        def come_back() -> None:
            self.model.weights.move(self.device)
            self._worker.release("offload")

        await self._worker.call(come_back)
        self._state = "ready"

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""
        self._check_state("ready")
        return self._updates().open(transport, version)

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Copy the tensors in between two steps; requests in flight go on with the new weights.

        Their KV cache is recomputed first, unless the engine keeps it.

        By `memory` they are copied as they come; by other transports once the update is staged, complete and undamaged. A
        bucket with a wrong tensor is refused whole. Where earlier buckets were copied already, the engine then holds a
        mixture, fails the requests in flight, and refuses to generate until an update has succeeded.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or damaged.
        """
        self._check_state("ready")
        receiver = self._updates()
        with receiver.taking(plan):
            if isinstance(plan.channel, MemoryChannel):
                return await self._take(plan.version, plan.channel.buckets())
            update = await receiver.arrive(plan)
            assert isinstance(update, StagedUpdate), "no ranks were offered"
            return await self._take(plan.version, staged_buckets(update))

    def _updates(self) -> UpdateReceiver:
        if self._receiver is None:
            raise EngineError("torch engine: it was built without a receiver of weight updates")
        return self._receiver

    async def _take(self, version: str, buckets: AsyncIterator[Bucket]) -> Fingerprint:
        update, mixture = WeightUpdate(self.model.weights, version=version), self._mixture
        fingerprint: Fingerprint | None = None
        try:
            await self._worker.call(self._begin_update)
            self._mixture = None  # what is asked for from now on waits for the end
            async for bucket in buckets:
                await self._worker.call(partial(update.take, bucket))
            fingerprint = await self._worker.call(update.finish)
            self.weight_version = version
        finally:
            is_complete = fingerprint is not None
            await self._worker.call(lambda: self._end_update(update, complete=is_complete, before=mixture))
        return fingerprint

    async def close(self) -> None:
        """Stop the worker, and free everything; requests in flight fail with EngineError."""
        if self._receiver is not None:
            self._receiver.close()
        if self._state in ("not started", "closed"):
            self._state = "closed"
            return
        self._state = "closed"
        await asyncio.to_thread(self._worker.stop)
        self._answer(list(self._pending), EngineError("torch engine: closed while the request was in flight"))
        self._fresh.clear()
        del self.model, self._cache, self._scheduler, self._worker.scheduler

    def _load(self) -> None:
        if self._section.num_threads is not None:
            torch.set_num_threads(self._section.num_threads)
        checkpoint = open_weights(self._path, stacked=self._family.stacked)
        self._family.check_names(checkpoint, self.architecture)
        self.model = Decoder(
            self._family,
            self.architecture,
            max_length=self.max_context_len,
            dtype=self._dtype,
            device=self.device,
            with_kernels=self._section.kernels,
        )
        self.model.weights.load(checkpoint)
        self._cache = self.model.create_cache(
            self._section.max_running_requests,
            max_bytes=cache_bytes(self._section, self.device),
            max_tokens=self._section.max_total_tokens,
        )
        self._scheduler = self._worker.scheduler = Scheduler(
            self.model,
            self._cache,
            max_running=self._section.max_running_requests,
            max_prefill_tokens=self._section.max_prefill_tokens,
            with_sampling_masks=self._with_sampling_masks,
            with_routes=self._with_routes,
            steps=self._recorded(),
        )

    def _recorded(self) -> RecordedSteps | None:
        if not self._section.cuda_graphs or self.device.type != "cuda" or not can_record(self.model):
            return None
        return RecordedSteps(self.model, self._cache, max_running=self._section.max_running_requests)

    def _begin_update(self) -> None:
        self._worker.hold("update")
        self._worker.accept()

    def _end_update(self, update: WeightUpdate, *, complete: bool, before: str | None) -> None:
        """In the worker: go on with the new weights or the old ones, or not at all where they are a mixture, as `before` says of the old."""
        self._scheduler.forbid_sharing()
        if complete:
            self._scheduler.version = update.version
        if complete and not self._keeps_cache:
            self._scheduler.retract()
        self._worker.release("update")
        self._mixture = None if complete else update.mixture or before
        if self._mixture is not None:
            self._worker.refuse(self._scheduler.clear(), EngineError(f"torch engine: {self._mixture}"))

    def _check_state(self, wanted: str) -> None:
        if self._state != wanted:
            raise EngineError(f"torch engine: is {self._state}; wanted {wanted} for this call")

    def _gather(self) -> None:
        """Hand new requests over once the event loop has gone through whatever else is ready now."""
        if self._turns == 0:
            self._loop.call_soon(self._turn)
        self._turns = _SETTLE_TURNS

    def _turn(self) -> None:
        self._turns -= 1
        if self._turns:
            self._loop.call_soon(self._turn)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        self._worker.hand_over(self._fresh, delivered=self._delivered)
        self._fresh = []

    def _deliver(self, requests: Sequence[Request], error: EngineError | None) -> None:
        """Answer requests, and let their callers ask for more before the worker goes on."""
        self._delivered += 1
        self._answer(requests, error)
        self._gather()

    def _answer(self, requests: Sequence[Request], error: EngineError | None) -> None:
        for request in requests:
            if request.future.done():
                continue
            if error is None:
                request.future.set_result(request.completion(self.weight_version))
            else:
                own = EngineError(*error.args)  # whoever raises it gives it a traceback, and may add notes
                own.__cause__ = error.__cause__
                request.future.set_exception(own)


def cache_bytes(section: TorchSection, device: torch.device) -> int | None:
    """Return the most bytes of the KV cache: half of the GPU's memory that is free now, or of the machine's.

    None where that is unknown, or `max_total_tokens` says how large it is.
    """
    if section.max_total_tokens is not None:
        return None
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] // 2)
    found = memory_bytes()
    return None if found is None else found // 2


def context_len(section: TorchSection, architecture: Architecture) -> int:
    """Return the most tokens of prompt and response."""
    most = architecture.max_position_embeddings
    return min(section.max_context_len or most, most)


def engine_dtype(wanted: str, *, trained_in: str = "bfloat16", device: str | None = None) -> torch.dtype:
    """Return the dtype of weights and arithmetic for `torch.dtype`, whose `auto` is the trainer's where that is fast: on a kind of device
    (`cuda`, `cpu`) that may be another machine's, or here.

    It is float32 for float16, and for bfloat16 on a CPU that has no instructions for its products: the trainer's values are
    held exactly, and a step takes a third of the time.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    on_cuda = torch.cuda.is_available() if device is None else device == "cuda"
    is_fast = on_cuda or multiplies_bfloat16()
    return torch.bfloat16 if trained_in == "bfloat16" and is_fast else torch.float32
