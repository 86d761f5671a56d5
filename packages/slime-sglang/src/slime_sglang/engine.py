"""Engine `sglang`: `RolloutEngine` over an SGLang server that is a child of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime_core.build import BuildContext
from slime_core.config.sections import ModelSection, TrainSection
from slime_core.errors import DeadlineError, EngineError
from slime_core.protocols import Completion, Fingerprint, SamplingParams, TransferPlan
from slime_models.checkpoint import read_config
from slime_models.family import ModelFamily
from slime_models.transfer.channels import Encoding

from slime_sglang import loader
from slime_sglang.client import ConnectionLostError, SglangClient
from slime_sglang.inlets import Place, Update
from slime_sglang.loading import Loading
from slime_sglang.messages import completion, generate_request
from slime_sglang.process import ServerProcess, check_started, free_port
from slime_sglang.section import TRANSPORTS, SglangSection
from slime_sglang.server import server_arguments, server_command, server_environment
from slime_sglang.stager import Stager

#: Seconds between two looks at a server that is starting, or that is to get rid of its requests.
_POLL_S = 0.25
#: Seconds that a server gets to end after a lost connection: its sockets close before its exit status is known.
_LAST_BREATH_S = 1.0
_TRAINER_DTYPES = {True: "bfloat16", False: "float32"}


class SglangEngine:
    """Generates by an SGLang server. All methods must be called on the event loop that `start` ran on.

    Args:
        model_path: Hugging Face folder.
        family: of the model; says which tensors an update must hold.
        dtype: storage and compute dtype, as torch spells it.
        section: the engine's settings.
        folder: for the server's log.
        disk_dir: where transports write that go by the disk; `weights` in `folder` if None.
        keep_files: keep what they wrote for earlier versions.
        encoding: of changes.
    """

    transports: tuple[str, ...] = TRANSPORTS

    def __init__(
        self,
        model_path: Path,
        family: ModelFamily,
        *,
        dtype: str,
        section: SglangSection,
        folder: Path,
        disk_dir: Path | None = None,
        keep_files: bool = False,
        encoding: Encoding = "xor",
    ) -> None:
        self._section = section
        self._port = free_port()
        self._server = ServerProcess(
            server_command(
                model_path,
                port=self._port,
                dtype=dtype,
                arguments=[
                    "--custom-weight-loader",
                    *loader.LOADERS,
                    *server_arguments(section.server_args),
                ],
            ),
            environment=server_environment() | {"HF_HUB_OFFLINE": "1"},
            log=folder / "server.log",
        )
        self._slots = asyncio.Semaphore(section.server_concurrency)
        self._client: SglangClient | None = None
        # One thread for all of it: torch keeps a pool of workers for each thread that calls it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang-staging")
        self._loading = Loading(
            self, pause_mode=section.pause_mode, answer=folder.absolute() / "verdict.json"
        )
        self._stager = Stager(
            Place(
                shapes=family.hf_shapes(family.architecture(read_config(model_path))),
                dtype=dtype,
                model_path=model_path,
                staging_dir=section.staging_dir,
                disk_dir=disk_dir or folder / "weights",
                keep_files=keep_files,
                encoding=encoding,
                # Half, so that a server whose sender hangs can say so before the call to it is over.
                timeout_s=section.control_timeout_s / 2,
                on_thread=self._on_thread,
            )
        )
        self.weight_version = "initial"
        self._in_flight = 0
        self._aborts = 0
        self._lost: str | None = None

    async def start(self) -> None:
        """Start the server, and wait until it is ready.

        Raises:
            EngineError: it ended instead; shows the end of its log.
            DeadlineError: it was not ready after `start_timeout_s`.
        """
        section = self._section
        await self._server.start()
        self._client = SglangClient(
            f"http://127.0.0.1:{self._port}",
            connections=section.server_concurrency + 8,
            retries=section.request_retries,
        )
        try:
            async with asyncio.timeout(section.start_timeout_s):
                while not await self._is_ready():
                    check_started(self._server)
                    await asyncio.sleep(_POLL_S)
                _check_ranks(await self._client.get("/server_info", timeout_s=section.control_timeout_s))
        except TimeoutError as error:
            await self.close()
            raise DeadlineError(
                f"the SGLang server was not ready after {section.start_timeout_s:g} s; its log is {self._server.log}"
            ) from error
        except EngineError:
            await self.close()
            raise

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`.

        `min_new_tokens` forbids the tokens that would end the response earlier, as SGLang does.

        Raises:
            EngineError: the server refused the request, ended, or could not be reached.
            DeadlineError: no answer within `request_timeout_s`.
        """
        self._check_usable()
        aborts = self._aborts
        async with self._slots:
            if aborts != self._aborts:  # while it waited here
                return Completion(
                    tokens=[], log_probs=[], finish_reason="abort", weight_version=self.weight_version
                )
            self._in_flight += 1
            try:
                reply = await self._post(
                    "/generate", generate_request(tokens, params), timeout_s=self._section.request_timeout_s
                )
            finally:
                self._in_flight -= 1
        return completion(reply)

    async def abort(self) -> None:
        """End every request under way; each answers with its partial output and `abort`."""
        self._aborts += 1
        limit = self._section.control_timeout_s
        try:
            async with asyncio.timeout(limit):
                while self._in_flight:  # one may have reached the server after the last call
                    await self.control("/abort_request", {"rid": "", "abort_all": True})
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"abort: {self._in_flight} requests still under way after {limit:g} s"
            ) from error

    async def pause(self) -> None:
        """Stop generating and keep the requests under way."""
        await self.control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.control("/continue_generation", {})

    async def offload(self) -> None:
        """Release weights and cache; `onload` brings their memory back."""
        await self.control("/release_memory_occupation", {})

    async def onload(self) -> None:
        """Take the memory back. Where weights were released, the next update brings them."""
        await self.control("/resume_memory_occupation", {})

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""
        return self._stager.open(transport, version)

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Bring the tensors to the server, and have it load them when all are there and as they should be.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or was damaged
                on its way; names it. The server goes on with the old weights.
            EngineError: the server ended or broke off while it was loading; it then serves no more.
        """
        self._check_usable()
        async with self._stager.taking(plan) as update:
            return await self.load(update)

    async def load(self, update: Update) -> Fingerprint:
        """Have the server check and load an update that is staged; raises as `receive` does."""
        held = await self._loading.load(update)
        self.weight_version = update.version
        return held

    async def close(self) -> None:
        """Stop the server, and free everything. May be called twice."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await self._server.stop()
        self._thread.shutdown()
        self._stager.close()

    @property
    def is_running(self) -> bool:
        """Whether the server has not ended."""
        return self._server.exit_status is None

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call the server for something other than generation."""
        return await self._post(path, body, timeout_s=self._section.control_timeout_s)

    async def model_info(self) -> Mapping[str, Any]:
        """Return what the server says about its model."""
        self._check_usable()
        assert self._client is not None
        info: Mapping[str, Any] = await self._client.get(
            "/model_info", timeout_s=self._section.control_timeout_s
        )
        return info

    async def lose(self, why: str) -> None:
        """End the server: requests under way fail, and none goes on with weights that cannot be trusted."""
        self._lost = why
        await self._server.stop()

    async def _on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _is_ready(self) -> bool:
        assert self._client is not None
        try:
            await self._client.get("/health", timeout_s=_POLL_S * 8)
        except (EngineError, DeadlineError):
            return False
        return True

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call the server; as soon as it has ended, say so instead of waiting."""
        self._check_usable()
        assert self._client is not None
        call = asyncio.ensure_future(self._client.post(path, body, timeout_s=timeout_s))
        ended = asyncio.ensure_future(self._server.wait())
        try:
            await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                check_started(self._server)
            return await call
        except ConnectionLostError:
            await asyncio.wait({ended}, timeout=_LAST_BREATH_S)
            check_started(self._server)
            raise
        finally:
            call.cancel()
            ended.cancel()

    def _check_usable(self) -> None:
        if self._client is None:
            raise EngineError(
                "the SGLang engine is not started; call start() first, and nothing after close()"
            )
        if self._lost is not None:
            raise EngineError(f"the SGLang engine cannot be used any more: {self._lost}")
        check_started(self._server)


def create_engine(build: BuildContext) -> SglangEngine:
    """Return the engine for a run. Entry point `sglang` of the group `slime.engines`."""
    section, train = build.section(SglangSection), build.section(TrainSection)
    model_type = build.section(ModelSection).model_name or read_config(build.model_path).get("model_type")
    return SglangEngine(
        build.model_path,
        build.registry.resolve("slime.models", str(model_type)),
        dtype=section.dtype if section.dtype != "auto" else _TRAINER_DTYPES[train.bf16],
        section=section,
        folder=build.run_dir / "sglang",
        disk_dir=Path(train.update_weight_disk_dir or build.run_dir / "weights"),
        keep_files=train.update_weight_disk_keep_files,
        encoding=train.update_weight_delta_encoding,
    )


def _check_ranks(info: Mapping[str, Any]) -> None:
    sizes = {name: int(info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")}
    if any(size != 1 for size in sizes.values()):
        raise EngineError(
            f"the SGLang server has {sizes}; weights that arrive are proven for one rank only: leave all three at 1"
        )
