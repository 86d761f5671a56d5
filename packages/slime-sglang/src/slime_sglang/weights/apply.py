"""Has one server load a staged update: check it, load it, and report fingerprints of what it then holds."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Fingerprint
from slime_core.runtime.deadline import within
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.staging import StagedUpdate

from slime_sglang.weights.description import write_description
from slime_sglang.weights.protocol import CHECK, LOAD, RECEIVE, LoaderRequest, LoaderResult, read_result

#: In the names of all tensors of experts.
EXPERTS = ".experts."

logger = logging.getLogger(__name__)

#: Seconds that an update at the server gets to end by itself when its caller gives up.
_GRACE_S = 10.0

#: Has SGLang call a loader for the model that it serves; by itself it would call it for each draft model, too, with the same request.
_OF_THE_MODEL = {"selector": "target"}

#: Seconds between two looks at what ranks of several pipeline stages have answered.
_POLL_S = 0.02


class UpdatableServer(Protocol):
    """What an update needs of a server."""

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call it with a POST."""

    async def model_info(self) -> Mapping[str, Any]:
        """Return its `/model_info`."""

    control_timeout_s: float
    """Deadline of a call, seconds."""

    @property
    def keeps_cache(self) -> bool:
        """Whether its requests keep their KV cache, so that it cannot be flushed."""

    @property
    def is_external(self) -> bool:
        """Whether it may stay when the run ends."""

    async def loaded(self, version: str) -> None:
        """Be told that it has the weights of a version, while it is paused."""

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Pause it within the context."""

    async def lose(self, why: str) -> None:
        """Stop it: its weights cannot be trusted."""

    is_held: bool
    """Whether it is left paused after `paused`, until it has loaded an update: its weights are a mixture."""


class GroupBrokenError(WeightSyncError):
    """Ranks did not receive the rest of an update, as the sender or another rank left or hung; a server whose weights are a mixture
    is held."""


async def load_update(
    server: UpdatableServer, update: StagedUpdate | RanksUpdate, *, ranks: Ranks, answers: Path
) -> Fingerprint:
    """Have a server load an update; returns the fingerprints of what it then holds.

    Args:
        server: to be updated.
        update: a staged one, whose folder the server's host sees and which must not change meanwhile; or one that its ranks join.
        ranks: of the server.
        answers: folder for the results of its ranks, which the server's host must see, too.

    Raises:
        WeightSyncError: a tensor is unknown, missing, misshapen or damaged; names it. The server keeps the old weights; it is
            stopped where its ranks joined the update and some had been written.
        GroupBrokenError: its ranks joined the update, and it broke off.
        EngineError: the server exited or failed while it was loading; it is stopped.
        DeadlineError: it did not answer in time; it is stopped.
    """
    async with server.paused():
        try:
            if isinstance(update, RanksUpdate):
                held = await _receive(server, update, ranks=ranks, answers=answers)
            else:
                held = await _load(server, update, ranks=ranks, answers=answers)
            check_version(await server.model_info(), update.version)
            await server.loaded(update.version)
        except (EngineError, DeadlineError) as error:
            await server.lose(
                f"the update to version {update.version} broke off, and its weights may be a mixture: {error}"
            )
            raise
    return merged_fingerprints(held, update.fingerprint, ranks)


async def _load(
    server: UpdatableServer, update: StagedUpdate, *, ranks: Ranks, answers: Path
) -> list[Mapping[str, int]]:
    """Have a server check a staged update, then load it; returns what each rank then holds.

    Raises:
        WeightSyncError: the bytes are not those that were sent; names the tensors. The server keeps the old weights.
    """
    version = update.version

    def requests() -> list[LoaderRequest]:
        # New names for each call: a network file system may report for a while that a file is missing which was looked
        # for before.
        once = answers / f"loader-result-{secrets.token_hex(8)}"
        return [
            LoaderRequest(
                folder=str(update.folder),
                answer=f"{once}-{rank}.json",
                rank=rank,
                n_ranks=ranks.count,
                n_stages=ranks.stages,
                attention_ranks=ranks.attention,
                keeps=not server.is_external,
            )
            for rank in range(ranks.count)
        ]

    async with _weight_update(server):
        _raise_errors(await _call(server, CHECK, requests()), version)
        results = await _call(server, LOAD, requests(), version=version)
    _raise_errors(results, version)
    return [result.held or {} for result in results]


async def _receive(
    server: UpdatableServer, update: RanksUpdate, *, ranks: Ranks, answers: Path
) -> list[Mapping[str, int]]:
    """Have the ranks of a server receive an update and load it as it comes; returns what each then holds.

    Raises:
        WeightSyncError: something is wrong with it. The server is stopped where a weight had been written.
        GroupBrokenError: the rest did not come. The server is held where a weight had been written.
    """
    version, first, once = update.version, update.take_ranks(ranks.in_all), secrets.token_hex(8)
    description = answers / f"update-{once}.json"
    write_description(update, description)
    requests = [
        LoaderRequest(
            folder=str(description),
            answer=str(answers / f"loader-result-{once}-{rank}.json"),
            rank=rank,
            n_ranks=ranks.count,
            n_stages=ranks.stages,
            attention_ranks=ranks.attention,
            keeps=not server.is_external,
            group_rank=first + rank,
        )
        for rank in range(ranks.count)
    ]
    try:
        async with _weight_update(server):
            results = await _call(server, RECEIVE, requests)
    finally:
        description.unlink()
    is_mixture = any(result.is_written or result.error is None for result in results)
    errors = [result for result in results if result.error is not None]
    if errors and all(result.is_broken for result in errors):
        if is_mixture:
            server.is_held = True
        raise GroupBrokenError(f"update to version {version}: {errors[0].error}")
    if errors and is_mixture:
        await server.lose(why_mixed(version))
    _raise_errors(results, version)
    await server.control("/update_weight_version", {"new_version": version, "abort_all_requests": False})
    update.fingerprint |= results[0].sent or {}
    return [result.held or {} for result in results]


def why_mixed(version: str) -> str:
    """Return why a server is lost that has some weights of an update, and some of the one before."""
    return f"the update to version {version} failed, and its weights may be a mixture"


@asynccontextmanager
async def _weight_update(server: UpdatableServer) -> AsyncIterator[None]:
    """Have a server that is paused expect new weights of its model within the context; a draft model beside it keeps its own."""
    await server.control("/begin_weight_update", _OF_THE_MODEL)
    try:
        yield
    finally:
        await server.control("/end_weight_update", {})


async def finish_or_end[T](work: Coroutine[Any, Any, T], end: Callable[[], Awaitable[None]]) -> T:
    """Await work; when cancelled, wait for it for a bounded time, then call `end`, which must make it finish."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_GRACE_S)
        if not task.done():
            await end()
            await asyncio.wait({task})
        if (error := task.exception()) is not None:
            logger.warning("cancelled, and failed itself, which may be why: %s", error)
        raise


def check_version(info: Mapping[str, Any], version: str) -> None:
    """Check that a server reports the version that it was to load.

    Raises:
        EngineError: it reports another.
    """
    if info.get("weight_version") != version:
        raise EngineError(
            f"update to version {version}: the server says afterwards that it has version "
            f"{info.get('weight_version')!r}"
        )


def merged_fingerprints(held: Sequence[Mapping[str, int]], sent: Fingerprint, ranks: Ranks) -> Fingerprint:
    """Return the fingerprints of tensors that all ranks of a pipeline stage hold: the first that differs from `sent`, if any does.

    Of an expert it is enough that the ranks hold it that have experts: one group of those of a stage.

    Args:
        held: of each rank, stage after stage.
        sent: of the update.
        ranks: of the server.
    """
    names = set[str]()
    for first in range(0, len(held), ranks.count):
        counts = Counter(name for part in held[first : first + ranks.count] for name in part)
        of_group = ranks.count // ranks.expert_groups
        names |= {
            name for name, n in counts.items() if n == ranks.count or (n == of_group and EXPERTS in name)
        }
    return {
        name: next((part[name] for part in having if part[name] != sent.get(name)), having[0][name])
        for name in names
        if (having := [part for part in held if name in part])
    }


@dataclass(frozen=True)
class Ranks:
    """Ranks of a server: how they share a model."""

    count: int = 1
    """Of a pipeline stage, which share matrices (tensor parallelism)."""
    attention: int = 1
    """That share attention; groups of so many in a row each have all of it (DP attention)."""
    expert_groups: int = 1
    """Groups of ranks in a row among which experts are divided (expert parallelism)."""
    stages: int = 1
    """Pipeline stages, each with layers of its own."""

    @property
    def in_all(self) -> int:
        """Of all stages."""
        return self.stages * self.count


def checked_ranks(info: Mapping[str, Any], wanted: int | None) -> Ranks:
    """Return the ranks of a server; `wanted` of them, where that is not None.

    Raises:
        EngineError: it has another number, or ranks of another kind, whose weights cannot be proven.
    """
    names = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "ep_size")
    sizes = {name: int(info.get(name) or 1) for name in names}
    if sizes["dp_size"] != 1:
        raise EngineError(
            f"the SGLang server has {sizes}; weights that arrive are proven for ranks that share a model: give attn_dp_size in place of "
            "dp_size"
        )
    count = sizes["tp_size"]
    ranks = Ranks(count, max(1, count // sizes["attn_dp_size"]), sizes["ep_size"], sizes["pp_size"])
    if wanted not in (None, ranks.in_all):
        raise EngineError(f"the SGLang server has {ranks.in_all} ranks; wanted {wanted}")
    return ranks


async def _call(
    server: UpdatableServer, function: str, requests: Sequence[LoaderRequest], *, version: str | None = None
) -> list[LoaderResult]:
    """Have each rank of the server call a loader, and return their results.

    Args:
        server: which is paused.
        function: the loader.
        requests: one for each rank of a pipeline stage.
        version: what the server reports from then on; None where it is as before.

    Raises:
        DeadlineError: one of several stages, for whose answers the server does not wait, did not answer in time.
        EngineError: it exited.
    """
    payloads = [pickle.dumps([(request.text(), _EmptyTensor())]) for request in requests]
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
        "load_format": function,
        **_OF_THE_MODEL,
    }
    options: dict[str, Any] = {} if version is None else {"weight_version": version}
    if function == CHECK or server.keeps_cache:
        options["flush_cache"] = False
    await server.control("/update_weights_from_tensor", body | options)
    n_stages = requests[0].n_stages
    answers = [Path(request.at_stage(stage).answer) for stage in range(n_stages) for request in requests]
    if n_stages > 1:
        what = f"answers of {n_stages} pipeline stages to a weight update (--sglang-control-timeout-s)"
        await within(server.control_timeout_s, what, _written(answers, server))
    return [read_result(path) for path in answers]


async def _written(answers: Sequence[Path], server: UpdatableServer) -> None:
    """Wait until a server has written files."""
    while not all(path.exists() for path in answers):
        await asyncio.sleep(_POLL_S)
        await server.model_info()  # raises where it has exited


def _raise_errors(results: Sequence[LoaderResult], version: str) -> None:
    """Raise what ranks found wrong with an update.

    Raises:
        WeightSyncError: a rank found something.
    """
    errors = sorted({result.error for result in results if result.error is not None})
    if errors:
        raise WeightSyncError(f"update to version {version}: {'; '.join(errors)}")


class _EmptyTensor:
    """Pickles as an empty tensor without torch's reducers, which Megatron replaces by ones that SGLang refuses."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return torch.Tensor, ()
