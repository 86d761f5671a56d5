"""Engine `torch`: `RolloutEngine` in this process, in plain PyTorch."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from slime_core.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.config.sections import ModelSection, TrainSection
from slime_core.errors import EngineError, WeightSyncError
from slime_core.protocols import (
    TOP_P_TOKENS,
    Completion,
    Fingerprint,
    SamplingParams,
    Tokenizer,
    TransferPlan,
)
from slime_core.weights import Agreement, MemoryChannel
from slime_models.architecture import Architecture
from slime_models.checkpoint import HfCheckpoint, read_config
from slime_models.cpu import attends_in_bfloat16, multiplies_bfloat16
from slime_models.family import ModelFamily

from slime_torch.cache import KvCache
from slime_torch.model import Decoder
from slime_torch.request import Request, StopRule
from slime_torch.scheduler import Scheduler
from slime_torch.section import TRANSPORTS, TorchSection
from slime_torch.update import Update
from slime_torch.worker import Worker

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
        with_nuclei: whether completions say from which ids top-p and top-k left their tokens to be drawn.
    """

    transports: tuple[str, ...] = TRANSPORTS

    def __init__(
        self,
        model_path: Path,
        family: ModelFamily,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        section: TorchSection,
        with_nuclei: bool = False,
    ) -> None:
        self._with_nuclei = with_nuclei
        self._path, self._family, self._tokenizer = model_path, family, tokenizer
        self._dtype, self._section = dtype, section
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.architecture = family.architecture(read_config(model_path))
        self.max_context_len = _context_len(section, self.architecture)
        self.weight_version = "initial"
        self._state = "not started"
        self._mixture: str | None = None
        self._agreement = Agreement()
        self._turns = self._delivered = 0
        self._fresh: list[Request] = []
        self._pending: set[Request] = set()

    async def start(self) -> None:
        """Load the model and start the worker thread.

        Raises:
            CheckpointError: the folder's weights are not those of its config.json.
            EngineError: the model has tensors that a dense decoder has no use for.
        """
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(self._loop, self._deliver)
        await self._worker.call(self._load)
        self._state = "ready"

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`.

        Raises:
            EngineError: the request cannot be served (says why), or the step that served it failed.
        """
        self._check_request(tokens, params)
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

    async def abort(self) -> None:
        """End every request under way; each answers with its partial output and `abort`."""
        self._check_state("ready")
        self._hand_over()
        await self._worker.call(lambda: self._worker.finish(self._scheduler.abort()))

    async def pause(self) -> None:
        """Stop generating after the current token, and keep the requests under way."""
        self._check_state("ready")
        await self._worker.call(lambda: self._worker.hold("pause"))

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._check_state("ready")
        await self._worker.call(lambda: self._worker.release("pause"))

    async def offload(self) -> None:
        """Free the key-value cache and move the weights to the host; requests are prefilled anew later."""
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
        if transport not in self.transports:
            raise WeightSyncError(
                f"update to version {version}: transport {transport!r}; wanted one of {list(self.transports)}"
            )
        dtype = str(self._dtype).removeprefix("torch.")
        return self._agreement.open(
            TransferPlan(transport=transport, version=version, dtype=dtype, channel=MemoryChannel())
        )

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Copy the tensors in between two steps; requests under way go on with the new weights.

        A bucket with a wrong tensor is refused whole. Where earlier buckets were copied already, the engine then
        holds a mixture, fails the requests under way, and refuses to generate until an update has succeeded.
        """
        self._check_state("ready")
        with self._agreement.taking(plan):
            return await self._take(plan)

    async def _take(self, plan: TransferPlan) -> Fingerprint:
        update = Update(self.model.weights, dtype=self._dtype, version=plan.version)
        mixture, self._mixture = self._mixture, None
        fingerprint: Fingerprint | None = None
        try:
            await self._worker.call(lambda: self._worker.hold("update"))
            async for bucket in plan.channel.buckets():
                await self._worker.call(partial(update.take, bucket))
            fingerprint = await self._worker.call(update.finish)
            self.weight_version = plan.version
        finally:
            self._mixture = mixture if fingerprint is None else None
            await self._worker.call(lambda: self._end_update(update, complete=fingerprint is not None))
        return fingerprint

    async def close(self) -> None:
        """Stop the worker, and free everything; requests under way fail with EngineError."""
        if self._state in ("not started", "closed"):
            self._state = "closed"
            return
        self._state = "closed"
        await asyncio.to_thread(self._worker.stop)
        self._answer(list(self._pending), EngineError("torch engine: closed while the request was under way"))
        self._fresh.clear()
        del self.model, self._cache, self._scheduler, self._worker.scheduler

    def _load(self) -> None:
        if self._section.num_threads is not None:
            torch.set_num_threads(self._section.num_threads)
        checkpoint = HfCheckpoint(self._path)
        self._family.check_names(checkpoint, self.architecture)
        self.model = Decoder(
            self.architecture,
            shapes=self._family.hf_shapes(self.architecture),
            max_length=self.max_context_len,
            dtype=self._dtype,
            device=self.device,
        )
        self.model.weights.load(checkpoint)
        self._cache = KvCache(
            self.architecture,
            max_slots=self._section.max_running_requests,
            dtype=attention_dtype(self._dtype, self.device),
            device=self.device,
        )
        self._scheduler = self._worker.scheduler = Scheduler(
            self.model,
            self._cache,
            max_running=self._section.max_running_requests,
            max_prefill_tokens=self._section.max_prefill_tokens,
            with_nuclei=self._with_nuclei,
        )

    def _end_update(self, update: Update, *, complete: bool) -> None:
        """In the worker: go on with the new weights or the old ones, or not at all."""
        self._scheduler.forbid_sharing()
        self._worker.release("update")
        if not complete and update.n_written:
            self._mixture = (
                f"the weights are a mixture: the update to version {update.version} ended after "
                f"{update.n_written} of {len(self.model.weights)} tensors; update again"
            )
            self._worker.finish(self._scheduler.clear(), EngineError(f"torch engine: {self._mixture}"))

    def _check_state(self, wanted: str) -> None:
        if self._state != wanted:
            raise EngineError(f"torch engine: is {self._state}; wanted {wanted} for this call")

    def _check_request(self, tokens: Sequence[int], params: SamplingParams) -> None:
        self._check_state("ready")
        if self._mixture is not None:
            raise EngineError(f"torch engine: {self._mixture}")
        n, vocab = len(tokens), self.architecture.vocab_size
        if n < 1 or params.max_new_tokens < 1:
            raise EngineError(
                f"torch engine: found {n} prompt tokens and max_new_tokens {params.max_new_tokens}; "
                "wanted at least 1 of each"
            )
        if n + params.max_new_tokens > self.max_context_len:
            raise EngineError(
                f"torch engine: {n} prompt tokens and max_new_tokens {params.max_new_tokens} are more than the "
                f"context of {self.max_context_len} tokens (the lower of --torch-max-context-len and the model's "
                "max_position_embeddings); lower one of them"
            )
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            raise EngineError(
                f"torch engine: found prompt ids from {min(tokens)} to {max(tokens)}; "
                f"wanted 0 to {vocab - 1}, the model's vocabulary"
            )
        if params.temperature < 0 or not 0 < params.top_p <= 1 or (params.top_k < 1 and params.top_k != -1):
            raise EngineError(
                f"torch engine: found temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}; "
                "wanted temperature >= 0, 0 < top_p <= 1, and top_k >= 1 or -1"
            )

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
                request.future.set_exception(EngineError(*error.args))


def _context_len(section: TorchSection, architecture: Architecture) -> int:
    """Return the most tokens of prompt and response."""
    most = architecture.max_position_embeddings
    return min(section.max_context_len or most, most)


def _family_of(build: BuildContext) -> ModelFamily:
    model_type = build.section(ModelSection).model_name or read_config(build.model_path).get("model_type")
    family: ModelFamily = build.registry.resolve("slime.models", str(model_type))
    return family


def context_limit(build: BuildContext) -> int:
    """Return the most tokens of prompt and response that the engine of a run takes."""
    architecture = _family_of(build).architecture(read_config(build.model_path))
    return _context_len(build.section(TorchSection), architecture)


def misfit(build: BuildContext) -> str | None:
    """Return why the engine cannot run the model of a run; None where it can. Reads no weights."""
    architecture = _family_of(build).architecture(read_config(build.model_path))
    shapes = _family_of(build).hf_shapes(architecture)
    try:
        Decoder(architecture, shapes=shapes, max_length=1, dtype=torch.float32, device=torch.device("meta"))
    except EngineError as error:
        return str(error)
    return None


def engine_dtype(wanted: str, *, trained_in: str = "bfloat16") -> torch.dtype:
    """Return the dtype of weights and arithmetic for `torch.dtype`, whose `auto` is the trainer's where that is fast here.

    It is float32 for float16, and for bfloat16 on a CPU that has no instructions for its products: the trainer's values are
    held exactly, and a step takes a third of the time.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    is_fast = torch.cuda.is_available() or multiplies_bfloat16()
    return torch.bfloat16 if trained_in == "bfloat16" and is_fast else torch.float32


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that attention and its KV cache have beside weights of `dtype`: float32 where that is faster."""
    return dtype if device.type == "cuda" or attends_in_bfloat16() else torch.float32


def create_engine(build: BuildContext) -> TorchEngine:
    """Return the engine for a run. Entry point `torch` of the group `slime.engines`."""
    section = build.section(TorchSection)
    return TorchEngine(
        build.model_path,
        _family_of(build),
        build.tokenizer,
        dtype=engine_dtype(section.dtype, trained_in=compute_dtype(build.section(TrainSection))),
        section=section,
        with_nuclei=TOP_P_TOKENS in build.engine_needs,
    )


create_engine.context_limit = context_limit  # type: ignore[attr-defined]  # see `config.model_fit.context_limit`
create_engine.offers = frozenset({TOP_P_TOKENS})  # type: ignore[attr-defined]  # see `BuildContext.engine_needs`
