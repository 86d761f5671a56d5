"""Engine `sglang`: `RolloutEngine` over one SGLang server, a child of this process or somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slime_core.errors import DeadlineError, EngineError
from slime_core.protocols import Completion, Fingerprint, SamplingParams, TransferPlan
from slime_models.checkpoint import read_config

from slime_sglang.apart import Pairing
from slime_sglang.child import server_child
from slime_sglang.client import ConnectionLostError, SglangClient
from slime_sglang.draft import NONE_SENT, Draft, answer
from slime_sglang.external import ExternalServer, check_joined, meet
from slime_sglang.gate import Gate
from slime_sglang.key import new_key
from slime_sglang.layout import Role
from slime_sglang.loading import load_update, provable_ranks, to_its_end
from slime_sglang.pictures import PLACEHOLDER, encoded
from slime_sglang.process import HeldPort, ServerProcess
from slime_sglang.routing import Routing, routing_of
from slime_sglang.section import TRANSPORTS, SglangSection
from slime_sglang.stager import Stager
from slime_sglang.staging import Update
from slime_sglang.targets import Targets

#: Seconds between two looks at a server that is starting.
_POLL_S = 0.25
#: Seconds that a server gets to end after a lost connection: its sockets close before its exit status is known.
_LAST_BREATH_S = 1.0


class SglangEngine:
    """Generates by an SGLang server. All methods must be called on the event loop that `start` ran on.

    Args:
        model_path: Hugging Face folder.
        dtype: storage and compute dtype, as torch spells it.
        section: the engine's settings.
        folder: for these files.
        stager: takes weight updates in for this server; None where a fleet does, for all of its servers.
        routes: whether completions must say which experts each token passed.
        is_updated: whether the run sends weights; where it does not, a server that is joined must have the right ones.
        name: of the server, of its log, and of the file that lists its Prometheus endpoint.
        arguments: SGLang's own, over those of `section`.
        address: `host:port` of a server that runs already and is joined; None starts one.
        n_ranks: tensor-parallel ranks of the server.
        n_ranks_in_all: of all servers that the run starts on this host.
        role: what it does of a request.
        key: that the server asks for. None makes one for a server that is started, and none for one that is joined.
    """

    transports: tuple[str, ...] = TRANSPORTS
    sees_images = True

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str,
        section: SglangSection,
        folder: Path,
        stager: Stager | None = None,
        routes: bool = False,
        is_updated: bool = True,
        name: str = "server",
        arguments: Mapping[str, Any] | None = None,
        address: str | None = None,
        n_ranks: int = 1,
        n_ranks_in_all: int | None = None,
        role: Role = "regular",
        key: str | None = None,
    ) -> None:
        self._path, self._dtype, self._section = model_path, dtype, section
        self._routes, self._is_updated, self.role = routes, is_updated, role
        self.n_ranks, self._n_ranks_in_all = n_ranks, n_ranks_in_all
        self._placeholder: int | None = read_config(model_path).get(PLACEHOLDER)
        self._ports = HeldPort(), HeldPort()
        self.name, self._address = name, address or f"127.0.0.1:{self._ports[0].number}"
        self.bootstrap_port = self._ports[1].number
        """Where engines that generate find this one, if it reads prompts."""
        self.is_external = address is not None
        self.key = key if key is not None or self.is_external else new_key()
        self._server: ServerProcess | ExternalServer = (
            ExternalServer(address) if address is not None else self._child(folder, arguments or {})
        )
        self._targets = Targets(folder, name, self._address)
        self.gate = Gate(section.server_concurrency)
        self._client: SglangClient | None = None
        self._stager = stager
        self._folder = folder.absolute()
        self.weight_version = NONE_SENT
        self.routing: Routing | None = None
        """How the server says which experts each token passed; None where it does not, or has not started."""
        self.suspected = asyncio.Event()
        """Set by whoever saw the server fail at something, for whoever watches it."""
        self.can_stream = False
        """Whether events of a stream bring what is new, and not all again; known once it is started."""
        self._is_quiet = False
        self._checking = asyncio.Lock()  # held by a check, which may generate a token
        self._lost: str | None = None

    @property
    def url(self) -> str:
        """Address of the server: `http://host:port`."""
        return f"http://{self._address}"

    @property
    def pending(self) -> int:
        """Requests that are under way or wait here."""
        return self.gate.pending

    @property
    def failure(self) -> str | None:
        """Why the engine cannot be used any more; None while it can."""
        return self._lost or self._server.failure

    async def start(self) -> None:
        """Start the server or join it, and wait until it is ready.

        Raises:
            EngineError: it ended instead, which shows the end of its log; or it is not one that can be used.
            DeadlineError: it was not ready after `start_timeout_s`.
        """
        section = self._section
        await self._server.start()
        limits = {"connections": section.server_concurrency + 8, "retries": section.request_retries}
        self._client = SglangClient(self.url, key=self.key, **limits)
        try:
            if self.is_external:
                await meet(self._client, self._server.name, timeout_s=section.control_timeout_s)
            async with asyncio.timeout(section.start_timeout_s):
                while not await self._is_ready():
                    self._check_usable()
                    await asyncio.sleep(_POLL_S)
                info = await self._client.get("/server_info", timeout_s=section.control_timeout_s)
            self.n_ranks = provable_ranks(info, None if self.is_external else self.n_ranks)
            if self.is_external:
                check_joined(
                    {**info, **await self.model_info()},
                    self._address,
                    model_path=self._path,
                    dtype=self._dtype,
                    routes=self._routes,
                    is_updated=self._is_updated,
                )
            self.routing = routing_of(read_config(self._path), info)
        except TimeoutError as error:
            await self.close()
            log = "" if self.is_external else f"; its log is {self._server.log}"
            why = f"{self._server.name} was not ready after {section.start_timeout_s:g} s{log}"
            raise DeadlineError(why) from error
        except EngineError:
            await self.close()
            raise
        self.can_stream = bool(info.get("incremental_streaming_output"))
        if info.get("enable_metrics"):
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
            EngineError: the server refused the request, ended, or could not be reached.
            DeadlineError: no answer within `request_timeout_s`.
            DataError: an image cannot be read.
        """
        draft = Draft(tokens, params, images=encoded(images), newest=self.weight_version)
        await self.extend(draft, stream=False)
        return draft.completion(self.weight_version)

    async def extend(self, draft: Draft, *, stream: bool, pairing: Pairing | None = None) -> None:
        """Have the server generate the rest of a response; nothing where an abort came before it was its turn.

        With `pairing` another engine reads the prompt.

        Raises:
            EngineError: the server refused the request, ended, or could not be reached. With `stream`, which wants
                `can_stream`, the draft has what arrived.
            DeadlineError: it took longer than `request_timeout_s`.
        """
        self._check_usable()
        await self.gate.pass_through(lambda: self._write(draft, stream=stream, pairing=pairing))

    async def _write(self, draft: Draft, *, stream: bool, pairing: Pairing | None) -> None:
        body = draft.request(stream=stream, routing=self.routing, placeholder=self._placeholder)
        body = body if pairing is None else pairing.body(body)
        limit = self._section.request_timeout_s
        writing = self._unless_ended(answer(self._usable(), draft, body, timeout_s=limit))
        await (writing if pairing is None else pairing.together(body, writing))

    async def read(self, body: Mapping[str, Any]) -> Any:
        """Have the server read a prompt and hand its cache over; None where an abort came before it was its turn."""
        limit = self._section.request_timeout_s
        return await self.gate.pass_through(lambda: self._post("/generate", body, timeout_s=limit))

    async def abort(self) -> None:
        """End every request under way; each answers with its partial output and `abort`."""
        await self.gate.abort(self.abort_requests, timeout_s=self._section.control_timeout_s)

    async def abort_requests(self) -> None:
        """End the requests that have reached the server, whoever sent them."""
        await self.control("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self) -> None:
        """Stop generating and keep the requests under way."""
        self._is_quiet = True
        await self.control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.control("/continue_generation", {})
        self._is_quiet = False

    async def offload(self) -> None:
        """Release weights and cache, once nothing is generated any more; `onload` brings their memory back."""
        async with self._checking:
            self._is_quiet = True
        await self._drain()  # SGLang ends where memory is released while a batch is under way
        await self.control("/release_memory_occupation", {})

    async def onload(self) -> None:
        """Take the memory back. Where weights were released, the next update brings them."""
        await self.control("/resume_memory_occupation", {})
        self._is_quiet = False

    async def probe(self, *, timeout_s: float) -> None:
        """Have the server generate a token; where it is not to generate now, have it answer.

        Raises:
            EngineError: it ended, or answers that it cannot.
            DeadlineError: no answer within `timeout_s`.
        """
        async with self._checking:
            was_quiet = self._is_quiet
            try:
                await self._get("/model_info" if was_quiet else "/health_generate", timeout_s=timeout_s)
            except (EngineError, DeadlineError):
                if was_quiet or not self._is_quiet:
                    raise
                await self._get("/model_info", timeout_s=timeout_s)  # it was told to be quiet meanwhile

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""
        assert self._stager is not None, "a fleet takes the updates of its engines in"
        return self._stager.open(transport, version)

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take the update in, and have the server load it when all is there and as it should be.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or was damaged
                on its way; names it. The server goes on with the old weights.
            EngineError: the server ended or broke off while it was loading; it then serves no more.
        """
        self._check_usable()
        with self._stager.taking(plan):
            return await self.load(await self._stager.arrive(plan))

    async def load(self, update: Update) -> Fingerprint:
        """Have the server load an update of this host; a caller that gives up waits until it has, or ends it.

        Raises:
            WeightSyncError: a tensor was damaged on its way; names it. The server goes on with the old weights.
            EngineError: the server ended or broke off while it was loading; it then serves no more.
        """
        why = f"the update to version {update.version} was given up while it was loading"
        return await to_its_end(self._load(update), lambda: self.lose(why))

    async def close(self) -> None:
        """Stop the server, and free everything. May be called twice."""
        await self._end(self._server.stop())

    async def kill(self) -> None:
        """End the server at once, and free everything."""
        await self._end(self._server.kill())

    async def ended(self) -> None:
        """Wait until the server has ended, for whatever reason."""
        await self._server.wait()

    async def _end(self, ending: Awaitable[None]) -> None:
        await ending
        for port in self._ports:
            port.release()
        self._targets.remove()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._stager is not None:
            self._stager.close()

    def _child(self, folder: Path, arguments: Mapping[str, Any]) -> ServerProcess:
        return server_child(
            self._path,
            dtype=self._dtype,
            section=self._section,
            arguments={**arguments, "enable_return_routed_experts": True} if self._routes else arguments,
            port=int(self._address.rpartition(":")[2]),
            log=folder / f"{self.name}.log",
            key=self.key,
            n_ranks=self.n_ranks,
            n_ranks_in_all=self._n_ranks_in_all,
            role=self.role,
            bootstrap_port=self.bootstrap_port,
        )

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call the server for something other than generation."""
        return await self._post(path, body, timeout_s=self._section.control_timeout_s)

    async def model_info(self) -> Any:
        """Return what the server says about its model."""
        return await self._get("/model_info", timeout_s=self._section.control_timeout_s)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Have the server generate nothing within the context; `pause_mode` says what becomes of its requests."""
        was_quiet, self._is_quiet = self._is_quiet, True
        if self.role != "regular":
            await self._drain()  # SGLang 0.5.23 hands over after a pause what was read before it
        await self.control("/pause_generation", {"mode": self._section.pause_mode})
        try:
            yield
        finally:
            if self._server.failure is None:
                await self.control("/continue_generation", {})
            self._is_quiet = was_quiet

    async def _drain(self) -> None:
        """Empty the server's cache, once it has no request any more."""
        await self._unless_ended(self._usable().drain(timeout_s=self._section.control_timeout_s))

    async def lose(self, why: str) -> None:
        """End the server: requests under way fail, and none goes on with weights that cannot be trusted."""
        self._lost = why
        await self._server.stop()

    async def _load(self, update: Update) -> Fingerprint:
        self._folder.mkdir(parents=True, exist_ok=True)
        held = await load_update(self, update, n_ranks=self.n_ranks, answers=self._folder)
        self.weight_version = update.version
        return held

    async def _is_ready(self) -> bool:
        assert self._client is not None
        try:
            await self._client.get("/health", timeout_s=_POLL_S * 8)
        except (EngineError, DeadlineError):
            return False
        return True

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        return await self._unless_ended(self._usable().post(path, body, timeout_s=timeout_s))

    async def _get(self, path: str, *, timeout_s: float) -> Any:
        return await self._unless_ended(self._usable().get(path, timeout_s=timeout_s, retries=0))

    async def _unless_ended(self, work: Awaitable[Any]) -> Any:
        """Await a call to the server; as soon as the server has ended, say so instead of waiting."""
        call = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._server.wait())
        try:
            await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._check_usable()
            return await call
        except ConnectionLostError:
            await asyncio.wait({ended}, timeout=0 if self.is_external else _LAST_BREATH_S)
            self._check_usable()
            raise
        finally:
            call.cancel()
            ended.cancel()

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
