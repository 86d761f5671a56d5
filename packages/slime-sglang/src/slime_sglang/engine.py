"""`SglangEngine`: the engine `sglang` over one SGLang server, a child of this process or an external one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slime_core.errors import DeadlineError, EngineError
from slime_core.protocols import Completion, EngineLoad, Fingerprint, SamplingParams, TransferPlan
from slime_core.runtime.processes.ports import reserve_server_ports
from slime_core.runtime.processes.server_process import ServerProcess
from slime_models.hf.config import read_config
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.staging import StagedUpdate

from slime_sglang.generation.disaggregation import PrefillDecodePair
from slime_sglang.generation.images import PLACEHOLDER, data_urls
from slime_sglang.generation.response import PartialResponse, answer
from slime_sglang.generation.routed_experts import RoutedExpertsFormat, routed_experts_format
from slime_sglang.http.api_key import new_key
from slime_sglang.http.client import CHECK_FLAG, REQUEST_FLAG, SglangClient
from slime_sglang.http.request_gate import RequestGate
from slime_sglang.server.answers import Answers
from slime_sglang.server.device_memory import DeviceMemory
from slime_sglang.server.external import ExternalServer, check_external, wake_external
from slime_sglang.server.load import server_load
from slime_sglang.server.managed import create_server
from slime_sglang.server.placed import PlacedServer
from slime_sglang.server.prometheus import PrometheusTargets
from slime_sglang.settings.section import CAPABILITIES
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.apply import Ranks, checked_ranks, finish_or_end, load_update, why_mixed
from slime_sglang.weights.protocol import NONE_SENT

#: Seconds between two looks at a server that is starting.
_POLL_S = 0.25


class SglangEngine:
    """Generates by one SGLang server. All methods must be called on the event loop that `start` ran on.

    Args:
        settings: of the server.
        receiver: receives weight updates for this server; None where a fleet does, for all of its servers.
    """

    capabilities = CAPABILITIES

    def __init__(self, settings: ServerSettings, *, receiver: UpdateReceiver | None = None) -> None:
        self._settings, self._section, self._receiver = settings, settings.section, receiver
        self.name, self.role, self.n_ranks = settings.name, settings.role, settings.n_ranks
        self._ranks = Ranks()  # which are known once it is started
        self.control_timeout_s = settings.section.control_timeout_s
        """Deadline of a call that is no generation, seconds."""
        self._placeholder: int | None = read_config(settings.model_path).get(PLACEHOLDER)
        self._ports = reserve_server_ports()
        self.bootstrap_address = f"127.0.0.1:{self._ports[1].number}"
        """Where decode engines find this one, if it is a prefill engine; known once it is started."""
        self.is_external = settings.address is not None
        self.key = settings.key if settings.key is not None or self.is_external else new_key()
        """API key that the server asks for; None where it asks for none."""
        self._server: ServerProcess | ExternalServer | PlacedServer
        if settings.address is not None:
            self._address = settings.address
            self._server = ExternalServer(settings.address)
        else:
            assert self.key is not None
            port, bootstrap, meeting = (reserved.number for reserved in self._ports)
            self._address = f"127.0.0.1:{port}"
            self._server = create_server(settings, ports=(port, bootstrap, meeting), key=self.key)
        self._answers = Answers(self._server, self._check_usable)
        self.gate = RequestGate(self._section.server_concurrency)
        self._client: SglangClient | None = None
        self.weight_version, self._salt = NONE_SENT, new_key()
        self.experts_format: RoutedExpertsFormat | None = None
        """How the server reports the experts of each token; None where it does not, or has not started."""
        self.suspected = asyncio.Event()
        """Set by whoever saw the server fail at something, for whoever watches it."""
        self.can_stream = False
        """Whether each event of a stream brings only new tokens; known once it is started."""
        self._is_paused, self._has_metrics, self._memory = False, False, DeviceMemory(self.control)
        self.is_held = False
        """Whether it stays paused until it has loaded an update, as its weights are a mixture."""
        self._sendable = asyncio.Event()
        self._sendable.set()
        self._checking = asyncio.Lock()  # held by a health check, which may generate a token
        self._lost: str | None = None

    @property
    def keeps_cache(self) -> bool:
        """Whether requests in flight keep their KV cache at an update; its prefix cache is then not flushed."""
        return self._settings.keeps_cache

    @property
    def url(self) -> str:
        """Address of the server: `http://host:port`."""
        return f"http://{self._address}"

    @property
    def _targets(self) -> PrometheusTargets:
        return PrometheusTargets(self._settings.folder, self.name, self._address)

    @property
    def pending(self) -> int:
        """Requests in flight at the server, or waiting here."""
        return self.gate.pending

    @property
    def failure(self) -> str | None:
        """Why the engine cannot be used any more; None while it can."""
        return self._lost or self._server.failure

    async def start(self) -> None:
        """Start the server or join it, and wait until it is ready.

        Raises:
            EngineError: it exited, and the message shows the end of its log; or it does not serve what this run needs.
            DeadlineError: it was not ready after `start_timeout_s`.
        """
        section = self._section
        await self._server.start()
        if isinstance(self._server, PlacedServer):
            self._address, self.bootstrap_address = self._server.address, self._server.bootstrap_address
        limits = {"connections": section.server_concurrency + 8, "retries": section.request_retries}
        self._client = SglangClient(self.url, key=self.key, **limits)
        try:
            if self.is_external:
                await wake_external(self._client, self._server.name, timeout_s=section.control_timeout_s)
            async with asyncio.timeout(section.start_timeout_s):
                while not await self._is_ready():
                    self._check_usable()
                    await asyncio.sleep(_POLL_S)
                info = await self._client.get("/server_info", timeout_s=section.control_timeout_s)
            self._ranks = checked_ranks(info, None if self.is_external else self.n_ranks)
            self.n_ranks = self._ranks.in_all
            if self.is_external:
                check_external({**info, **await self.model_info()}, self._address, self._settings)
            self.experts_format = routed_experts_format(read_config(self._settings.model_path), info)
        except (EngineError, DeadlineError):
            await self.close()
            raise
        except TimeoutError as error:
            log = "" if self.is_external else f"; its log is {self._server.log}"
            why = f"{self._server.name} was not ready after {section.start_timeout_s:g} s{log}"
            await self._answers.tell("start", missed := DeadlineError(why))
            await self.close()
            raise missed from error
        self.can_stream = bool(info.get("incremental_streaming_output"))
        self._has_metrics = bool(info.get("enable_metrics"))
        if self._has_metrics:
            self._targets.write()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`, in which runs of placeholders stand for `images`.

        `min_new_tokens` forbids the tokens that would end the response earlier, as SGLang does.

        Raises:
            EngineError: the server refused the request, exited, or could not be reached.
            DeadlineError: no answer within `request_timeout_s`.
            DataError: an image cannot be read.
        """
        response = PartialResponse(tokens, params, images=data_urls(images), newest=self.weight_version)
        await self.extend(response, stream=False)
        return response.completion(self.weight_version)

    async def extend(
        self, response: PartialResponse, *, stream: bool, pair: PrefillDecodePair | None = None
    ) -> None:
        """Have the server generate the rest of a response; nothing where an abort came before the request was sent.

        With `pair`, this engine decodes, and the pair's prefill engine gets the same request.

        Raises:
            EngineError: the server refused the request, exited, or could not be reached. With `stream`, which needs
                `can_stream`, the response keeps the tokens that arrived.
            DeadlineError: it took longer than `request_timeout_s`.
        """
        self._check_usable()
        await self.gate.pass_through(lambda: self._send(response, stream=stream, pair=pair))

    async def _send(self, response: PartialResponse, *, stream: bool, pair: PrefillDecodePair | None) -> None:
        body = response.request(
            stream=stream, experts_format=self.experts_format, placeholder=self._placeholder
        )
        await self._sendable.wait()
        await self._memory.take_all()
        if self.keeps_cache:
            # The prefix cache is not flushed at updates, and an external server has those of runs before, whose versions come again.
            body["extra_key"] = f"{self._salt}-{self.weight_version}"
        body = body if pair is None else pair.body(body)
        limit = self._section.request_timeout_s
        answered = self._answers.of("generate", answer(self._usable(), response, body, timeout_s=limit))
        await (answered if pair is None else pair.run(body, answered))

    async def prefill(self, body: Mapping[str, Any]) -> Any:
        """Have the server prefill a prompt and transfer its KV cache; None where an abort came before the request was sent."""
        limits = {"timeout_s": self._section.request_timeout_s, "flag": REQUEST_FLAG}
        await self._memory.take_all()
        return await self.gate.pass_through(lambda: self._post("/generate", body, **limits))

    async def current_load(self) -> EngineLoad:
        """Return how busy the server is, by its own count; requests that wait here are queued, too."""
        limit = self.control_timeout_s
        counted = await self._get("/v1/loads?include=disagg", timeout_s=limit)
        counters = ""
        if self._has_metrics:
            counters = await self._answers.of("/metrics", self._usable().text("/metrics", timeout_s=limit))
        return server_load(counted, counters, waiting_here=self.gate.waiting)

    async def abort(self) -> None:
        """Abort every request in flight; each answers with its partial output and `abort`."""
        await self.gate.abort(self.abort_requests, timeout_s=self.control_timeout_s)

    async def abort_requests(self) -> None:
        """Abort the requests that have reached the server, whoever sent them."""
        await self.control("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self) -> None:
        """Stop generating, and keep the requests in flight (their KV cache is recomputed)."""
        self._is_paused = True
        await self.control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after `pause`."""
        if not self.is_held:
            await self.control("/continue_generation", {})
        self._is_paused = False

    async def offload(self) -> None:
        """Release the memory of weights and KV cache once the server is idle; `onload` takes it back."""
        async with self._checking:
            self._is_paused = True
        await self._drain()  # SGLang exits where memory is released while a batch runs
        await self._memory.release()
        self.weight_version = NONE_SENT  # the same weights are sent again

    async def onload(self) -> None:
        """Take the memory of the weights back, which are undefined until the next update; that of the KV cache follows the next request."""
        await self._memory.take_for_weights()
        self._is_paused = False

    async def probe(self, *, timeout_s: float) -> None:
        """Check the server's health: have it generate a token or, while it is paused, answer.

        Raises:
            EngineError: it exited, or answers that it is not healthy.
            DeadlineError: no answer within `timeout_s`.
        """
        async with self._checking:
            limits = {"timeout_s": timeout_s, "flag": CHECK_FLAG}
            was_paused = self._is_paused or self.is_held or self._memory.lacks_cache
            try:
                await self._get("/model_info" if was_paused else "/health_generate", **limits)
            except (EngineError, DeadlineError):
                if was_paused or not self._is_paused:
                    raise
                await self._get("/model_info", **limits)  # it was paused meanwhile

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""
        return self._updates().open(transport, version, has_ranks=True)

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Receive the update, and have the server load it once it is complete and checked; or as it comes, by ranks that join it.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or damaged; names
                it. The server keeps the old weights.
            EngineError: the server exited or failed while it was loading; it is not used any more.
        """
        self._check_usable()
        receiver = self._updates()
        with receiver.taking(plan):
            update = await receiver.arrive(plan)
            if isinstance(update, RanksUpdate):
                update.begin(self.n_ranks)
            try:
                return await self.load(update)
            finally:
                if self.is_held:
                    await self.lose(why_mixed(plan.version))

    def _updates(self) -> UpdateReceiver:
        assert self._receiver is not None, "a fleet receives the updates of its engines"
        return self._receiver

    async def load(self, update: StagedUpdate | RanksUpdate) -> Fingerprint:
        """Have the server load an update that is staged on this host, or that its ranks join.

        A cancelled caller waits until it has, or stops it.

        Raises:
            WeightSyncError: a tensor was damaged; names it. The server keeps the old weights; see `load_update`.
            EngineError: the server exited or failed while it was loading; it is not used any more.
        """
        why = f"the update to version {update.version} was given up while it was loading"
        return await finish_or_end(self._load(update), lambda: self.lose(why))

    async def close(self) -> None:
        """Stop the server, and free everything. May be called twice."""
        await self._shut_down(self._server.stop())

    async def kill(self) -> None:
        """Kill the server, and free everything."""
        await self._shut_down(self._server.kill())

    async def ended(self) -> None:
        """Wait until the server has exited, for whatever reason."""
        await self._server.wait()

    async def _shut_down(self, ending: Awaitable[None]) -> None:
        await ending
        for port in self._ports:
            port.release()
        self._targets.remove()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._receiver is not None:
            self._receiver.close()

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call the server for something other than generation."""
        return await self._post(path, body, timeout_s=self.control_timeout_s)

    async def model_info(self) -> Any:
        """Return what the server says about its model."""
        return await self._get("/model_info", timeout_s=self.control_timeout_s)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the server within the context; its requests recompute their KV cache afterwards, or keep it."""
        was_paused, self._is_paused = self._is_paused, True
        if self.role != "regular":
            await self._drain()  # after a pause, SGLang 0.5.23 transfers caches computed before it
        await self.control("/pause_generation", {"mode": "in_place" if self.keeps_cache else "retract"})
        if self.keeps_cache:
            self._sendable.clear()  # a request that is sent now would look for a prefix of the old weights
        try:
            yield
        finally:
            self._sendable.set()
            if self._server.failure is None and not self.is_held and not was_paused:
                await self.control("/continue_generation", {})
            self._is_paused = was_paused

    async def _drain(self) -> None:
        """Flush the server's KV cache once it has no request any more."""
        await self._answers.of("/flush_cache", self._usable().drain(timeout_s=self.control_timeout_s))

    async def lose(self, why: str) -> None:
        """Stop the server, whose weights cannot be trusted: requests in flight fail."""
        self._lost = why
        await self._server.stop()

    async def _load(self, update: StagedUpdate | RanksUpdate) -> Fingerprint:
        folder = self._settings.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return await load_update(self, update, ranks=self._ranks, answers=folder)

    async def loaded(self, version: str) -> None:
        """Say that the paused server has loaded an update. Its KV cache comes back with a request: a trainer may have weights there."""
        self.weight_version, self.is_held = version, False

    async def _is_ready(self) -> bool:
        assert self._client is not None
        try:
            await self._client.get("/health", timeout_s=_POLL_S * 8)
        except (EngineError, DeadlineError):
            return False
        return True

    async def _post(self, path: str, body: Mapping[str, Any], **limits: Any) -> Any:
        return await self._answers.of(path, self._usable().post(path, body, **limits))

    async def _get(self, path: str, **limits: Any) -> Any:
        return await self._answers.of(path, self._usable().get(path, retries=0, **limits))

    def _usable(self) -> SglangClient:
        if self._client is None:
            raise EngineError("the SGLang engine is not started; call start() first, nothing after close()")
        self._check_usable()
        return self._client

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise EngineError(f"the SGLang engine cannot be used any more: {self._lost}")
        if self._server.failure is not None:
            raise EngineError(self._server.failure)
