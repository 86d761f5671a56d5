"""Contract kit of weight transports: what is sent arrives, update after update, and nothing else counts as an update."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import ContractError, PluginError, WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.testing.contracts.kit import Kit
from slime_core.testing.contracts.promises import answering, require, run_within
from torch import Tensor

from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.manifest import TensorCheck
from slime_models.transfer.meeting import BroadcastChannel
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.staging import StagedTensors, StagedUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transport import Transport

#: Seconds that a whole check may take.
PATIENCE_S = 120.0
#: Seconds that one half gets to notice that the other failed.
_BROKEN_S = 0.5
_SHAPES = {"a": (3, 5), "empty": (0, 4), "b": (130,), "bias": ()}


class _BrokenOff(Exception):
    """Raised by a sender in the midst of an update."""


def check_transport(transport: Transport, *, device: str = "cpu") -> None:
    """Check a weight transport: updates arrive bit for bit; one that breaks off or lacks a tensor never does; and what follows arrives.

    Both halves run in this process, over a model of four small tensors, and on a CPU so does the rank of a server where ranks join
    updates.

    Args:
        transport: what is checked.
        device: of the tensors that are sent. Where that is `cuda`, the rank of a server is a process of its own: on the same GPU for a
            transport that shares it, else on the second one; on the CPU where there is none.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"transport {transport.name}"
    with tempfile.TemporaryDirectory(prefix="slime-contract-") as folder:
        run_within(where, _check(where, transport, Path(folder), device), seconds=PATIENCE_S)


def _check_installed(transport: Transport) -> str | None:
    try:
        check_transport(transport)
    except ContractError as error:
        if not isinstance(error.__cause__, PluginError):
            raise
        return str(error.__cause__)  # a package that it needs is not installed
    return None


#: The entry point `transports` of `slime.kits`.
KIT = Kit(_check_installed, patience_s=PATIENCE_S)


async def _check(where: str, transport: Transport, folder: Path, device: str) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    storage = UpdateStorage(
        specs={name: Spec(shape=shape, dtype="bfloat16") for name, shape in _SHAPES.items()},
        model_path=folder / "model",
        staging_dir=folder / "staging",
        disk_dir=folder / "disk",
        keep_files=False,
        encoding="xor",
        timeout_s=PATIENCE_S,
        has_ranks=True,
    )
    halves: _Halves | None = None
    try:
        with answering(where, "two halves"):
            halves = _Halves(where, transport, storage, device)
        nothing = not storage.has_staging and not (folder / "disk").exists()
        require(nothing, where, found="memory or files before the first update", wanted="none")
        await halves.check_arrives("1", _tensors(1, device))
        await halves.check_arrives("2", _tensors(2, device))
        await halves.check_broken_off("3", _tensors(3, device))
        await halves.check_arrives("4", _tensors(4, device))
        await halves.check_incomplete("5", _tensors(5, device))
        await halves.check_arrives("6", _tensors(6, device))
    finally:
        if halves is not None:
            halves.close()
        storage.close()


def _tensors(seed: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}
    return {name: each.bfloat16().to(device) for name, each in drawn.items()}


@dataclass(frozen=True)
class _Arrived:
    """An update as the receiving side has it."""

    version: str
    fingerprint: Fingerprint
    tensors: Callable[[], Mapping[str, Tensor]]


class _Rank:
    """The only rank of a server: in this process, or where the sender's tensors are on a GPU in one of its own.

    Args:
        transport: by which it receives.
        device: of the tensors that are sent.
    """

    def __init__(self, transport: Transport, device: str) -> None:
        self._device, self._receiver = device, None if _is_cuda(device) else RankReceiver(torch.device("cpu"))
        self._processes: ProcessPoolExecutor | None = None
        if transport.by_ranks and self._receiver is None:
            of_rank = _device_of_rank(transport, device)
            start = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(1, start, initializer=_begin_rank, initargs=(of_rank,))

    def join(self, update: RanksUpdate) -> _Arrived:
        """Join an update, and return what came.

        Raises:
            WeightSyncError: the sender left, or a tensor is unknown, misshapen or missing.
        """
        update.begin(1)
        words = update.channel, update.take_ranks(1), update.specs, update.version
        if self._receiver is not None:
            tensors, sent = _received(self._receiver, *words)
        else:
            assert self._processes is not None, "a transport by ranks"
            tensors, sent = self._processes.submit(_received_there, *words).result()
        return _Arrived(update.version, sent, lambda: tensors)

    def close(self) -> None:
        """End its process."""
        if self._processes is not None:
            self._processes.shutdown()


#: The rank of this process, where it is that of a `_Rank`.
_own_rank: list[RankReceiver] = []


def _begin_rank(device: str) -> None:
    _own_rank.append(RankReceiver(torch.device(device)))


def _received_there(*words: Any) -> tuple[dict[str, Tensor], Fingerprint]:
    return _received(_own_rank[0], *words)


def _received(
    rank: RankReceiver, channel: BroadcastChannel, number: int, specs: Mapping[str, Spec], version: str
) -> tuple[dict[str, Tensor], Fingerprint]:
    """Return the tensors of an update, in host memory, and the fingerprints that were announced; see `_Rank.join`."""
    check, tensors, sent = TensorCheck(specs, version=version), dict[str, Tensor](), dict[str, int]()
    for bucket in rank.buckets(channel, number):
        for entry in bucket.entries:
            check.see(entry.name, entry.shape, entry.dtype)
            tensors[entry.name] = bucket.tensors[entry.name].to("cpu", copy=True)
            sent[entry.name] = entry.fingerprint
    check.end()
    return tensors, sent


class _Halves:
    """Both halves of a transport, over one storage."""

    def __init__(self, where: str, transport: Transport, storage: UpdateStorage, device: str) -> None:
        self._where, self._storage, self._transport = where, storage, transport
        self._sender = transport.create_sender(asyncio.to_thread)
        self._receiver = transport.create_receiver(storage)
        self._rank = _Rank(transport, device)

    async def check_arrives(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that an update is the one that was sent."""
        where, plan = f"{self._where}: update to version {version}", self._plan(version)
        with answering(where, "one that arrives"):
            sent, update = await self._both(plan, tensors)
            errors = [error for error in (update, sent) if isinstance(error, BaseException)]
            for error in sorted(errors, key=lambda error: isinstance(error, WeightSyncError)):
                raise error  # one half's own before what the other says of it
        if not isinstance(update, _Arrived) or update.version != version:
            raise ContractError(f"{where}: found {update!r:.80}; wanted an update of this version")
        with answering(where, "every tensor"):
            found = update.tensors()
            changed = [
                name for name, each in tensors.items() if fingerprint(found[name]) != fingerprint(each)
            ]
        require(not changed, where, found=f"other bytes in {changed}", wanted="those that were sent")
        same = update.fingerprint == {name: fingerprint(tensor) for name, tensor in tensors.items()}
        require(same, where, found="fingerprints that are not those sent", wanted="the same")

    async def check_broken_off(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that an update whose sender fails before its end is none."""
        where, plan = f"{self._where}: an update that breaks off", self._plan(version)
        sent, update = await self._both(plan, tensors, breaks_off=True)
        self._give_up(plan)
        found = "no error" if sent is None else f"{type(sent).__name__}: {sent}"
        require(isinstance(sent, _BrokenOff), where, found=found, wanted="the error of the sender, as it was")
        arrived = isinstance(update, _Arrived)
        require(not arrived, where, found="it as an update", wanted="an error, or none within its deadline")

    async def check_incomplete(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that an update without one of the model's tensors is refused by name."""
        where, plan = f"{self._where}: an update without 'b'", self._plan(version)
        _, update = await self._both(plan, {name: each for name, each in tensors.items() if name != "b"})
        self._give_up(plan)
        told = isinstance(update, WeightSyncError) and "b" in str(update)
        wanted = "a WeightSyncError that names the tensor"
        require(told, where, found=f"{update!r:.200}", wanted=wanted)

    async def _both(
        self, plan: TransferPlan, tensors: Mapping[str, Tensor], *, breaks_off: bool = False
    ) -> tuple[BaseException | None, _Arrived | BaseException | None]:
        """Run both halves; returns (the sender's error, what the receiver returned or raised), None of one that did not end."""
        sending = asyncio.create_task(self._send(plan, tensors, breaks_off=breaks_off))
        receiving = asyncio.create_task(self._arrives(plan))
        tasks = (sending, receiving)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.wait(tasks, timeout=_BROKEN_S)  # what is left has time to notice
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if isinstance(error := _outcome(sending), ContractError):
            raise error
        return error, _outcome(receiving)

    def close(self) -> None:
        """End what the rank runs in."""
        self._rank.close()

    async def _arrives(self, plan: TransferPlan) -> _Arrived:
        """Receive an update, as a server whose only rank this is where ranks are to join it."""
        update = await self._receiver.arrive(plan)
        if isinstance(update, StagedUpdate):
            folder = update.folder
            return _Arrived(update.version, update.fingerprint, lambda: dict(StagedTensors(folder).tensors()))
        return await asyncio.to_thread(self._rank.join, update)

    def _plan(self, version: str) -> TransferPlan:
        with answering(f"{self._where}: open", "a channel"):
            channel = self._receiver.open(version)
        return TransferPlan(
            transport=self._transport.name,
            version=version,
            dtype="bfloat16",
            senders=self._transport.senders,
            channel=channel,
        )

    async def _send(
        self, plan: TransferPlan, tensors: Mapping[str, Tensor], *, breaks_off: bool = False
    ) -> None:
        """Send a bucket for each tensor, whose memory is used for something else afterwards."""
        async with self._sender.update(plan) as update:
            for name, tensor in tensors.items():
                lent = tensor.clone()
                n_bytes = await update.put([(name, lent)], {name: fingerprint(lent)})
                lent.fill_(7.0)
                known = isinstance(n_bytes, int) and n_bytes >= 0
                require(known, f"{self._where}: put", found=f"{n_bytes!r}", wanted="how many bytes were sent")
            if breaks_off:
                raise _BrokenOff
            await update.end()

    def _give_up(self, plan: TransferPlan) -> None:
        """Do what an engine does after an update that failed."""
        with answering(f"{self._where}: give_up", "that it may be called after any failure"):
            self._receiver.give_up(plan)
        self._storage.forget()
        self._storage.drop_folders()


def _device_of_rank(transport: Transport, device: str) -> str:
    """Return the device of the rank that joins updates: a GPU where the transport can have one, or the CPU."""
    if transport.shares_gpus:
        return device
    return "cuda:1" if torch.cuda.device_count() > 1 else "cpu"


def _is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _outcome[T](task: asyncio.Task[T]) -> T | BaseException | None:
    return None if task.cancelled() else task.exception() or task.result()
