"""A third party's weight transport, in one module: a named pipe, through which tensors go one after another."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from slime_core.errors import WeightSyncError
from slime_models.transfer.transport import ThreadSender, Transport


@dataclass(frozen=True)
class PipeChannel:
    path: Path


class PipeWriter:
    """The sending half of one update."""

    def __init__(self, plan):
        self._path, self._version = plan.channel.path, plan.version

    def __enter__(self):
        self._pipe = self._path.open("wb", buffering=0)
        return self

    def put(self, bucket, fingerprints):
        return sum(self._send(name, tensor, fingerprints[name]) for name, tensor in bucket)

    def end(self):
        self._write({"end": self._version})

    def __exit__(self, *error):
        self._pipe.close()

    def _send(self, name, tensor, checksum):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        self._write({"name": name, "fingerprint": checksum, "n_bytes": len(data)} | kind, data)
        return len(data)

    def _write(self, message, data=b""):
        view = memoryview(json.dumps(message).encode() + b"\n" + data)
        try:
            while view:
                view = view[self._pipe.write(view) :]
        except BrokenPipeError as error:
            raise WeightSyncError(f"update to version {self._version}: the receiver went") from error


class PipeReceiver:
    """The receiving half."""

    def __init__(self, storage):
        self._storage, self._ends = storage, {}

    def open(self, version):
        channel = PipeChannel(self._storage.staging.folder / f"pipe-{secrets.token_hex(4)}")
        os.mkfifo(channel.path)
        self._ends[channel] = os.open(
            channel.path, os.O_RDWR | os.O_NONBLOCK
        )  # so that neither side waits to open it
        return channel

    async def arrive(self, plan):
        reader, storage = asyncio.StreamReader(), self._storage
        end = os.fdopen(self._ends.pop(plan.channel), "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), end
        )
        try:
            await storage.on_thread(storage.staging.begin, plan.version)
            while "end" not in (message := json.loads(await reader.readline())):
                data = bytearray(await reader.readexactly(message["n_bytes"]))
                await storage.on_thread(partial(self._stage, message, data))
        finally:
            transport.close()
            plan.channel.path.unlink()
        return storage.staging.seal()

    def give_up(self, plan):
        if plan.channel in self._ends:
            os.close(self._ends.pop(plan.channel))

    def _stage(self, message, data):
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(getattr(torch, message["dtype"])).view(message["shape"])
        name = message["name"]
        self._storage.staging.put([(name, tensor)], {name: message["fingerprint"]})


TRANSPORT = Transport(
    name="pipe", create_sender=partial(ThreadSender, PipeWriter), create_receiver=PipeReceiver
)
