"""`slime bench weights`: weight updates of a real server by each transport, beside a plain memory copy of the same bytes."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import Fingerprint, TrainerCapabilities, TransferPlan
from slime_core.run.build import resolve_model
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.weights.sync import Bucket, sync_weights
from slime_models.groups import OWN_TRANSPORTS
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.transfer.changes import encode_changes
from slime_models.transfer.sender import WeightSender
from slime_sglang.engine import SglangEngine
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.receiver import create_receiver
from torch import Tensor

from slime_bench.random_work import SHAPES, write_random_model

_TIMEOUT_S = 600.0
#: Plain copies in a row.
_COPIES = 3
#: `distributed` as it goes to another machine, where the receiver's memory is out of reach.
_BY_SOCKETS = "by sockets"
_TEXT = "In the {}th lesson we count apples and pears: {} and {} make {}, and one more makes {}."

#: By which ranks of servers receive updates themselves.
_BY_RANKS = ("nccl", "cuda-ipc")
_TRANSPORTS = (*OWN_TRANSPORTS, *_BY_RANKS, _BY_SOCKETS)

Weights = Mapping[str, Tensor]


def weights(argv: list[str]) -> int:
    """Measure weight updates of an SGLang server by each transport, all of them checked and proven as in a run.

    The seconds are those of a whole update: sent, staged, checked, loaded, fingerprinted. `disk-delta` is measured twice:
    with all weights, and with what real optimizer steps of `--lr` changed (of a model that is trained, not of `--shape`). All
    transports take turns in one run; those by a group of ranks, which stays for the next update as in a run, update twice a turn,
    and the second update counts.
    """
    options = _parse(argv)
    registry = Registry.from_environment()
    with tempfile.TemporaryDirectory(prefix="slime-bench-", dir=options.dir) as folder:
        model_path = Path(folder) / "model" if options.shape else resolve_model(options.model, registry)
        if options.shape:
            model_path.mkdir()
            write_random_model(SHAPES[options.shape], model_path)
        family = registry.resolve("slime.models", read_config(model_path)["model_type"])
        section = SglangSection(server_args={"max_total_tokens": 1024, "max_running_requests": 4})
        receiver = create_receiver(
            model_path,
            family,
            dtype="bfloat16",
            section=section,
            registry=registry,
            disk_dir=Path(folder) / "weights",
            encoding=options.encoding,
        )
        engine = SglangEngine(
            ServerSettings(model_path=model_path, dtype="bfloat16", section=section, folder=Path(folder)),
            receiver=receiver,
        )
        asyncio.run(_measure(engine, registry, model_path, options))
    return 0


class _Sender:
    """The sending half of a trainer whose weights are at hand."""

    capabilities = TrainerCapabilities(transports=(*OWN_TRANSPORTS, *_BY_RANKS))

    def __init__(self, registry: Registry, thread: DaemonThread, bucket_bytes: int) -> None:
        self.sender, self.weights = WeightSender(self._on_thread, registry), dict[str, Tensor]()
        self.sees_memory = True
        self._thread, self._bucket_bytes = thread, bucket_bytes

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send them."""
        if not self.sees_memory:
            plan = dataclasses.replace(plan, channel=dataclasses.replace(plan.channel, memory=None))
        return await self.sender.send(plan, self._buckets())

    async def _on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _buckets(self) -> AsyncIterator[tuple[Bucket, Fingerprint]]:
        bucket: list[tuple[str, Tensor]] = []
        held = 0
        for name, tensor in self.weights.items():
            bucket.append((name, tensor))
            held += tensor.nbytes
            if held >= self._bucket_bytes:
                yield bucket, {}
                bucket, held = [], 0
        if bucket:
            yield bucket, {}


async def _measure(
    engine: SglangEngine, registry: Registry, model_path: Path, options: argparse.Namespace
) -> None:
    checkpoint = HfCheckpoint(model_path)
    first = {name: checkpoint[name].to(torch.bfloat16).clone() for name in checkpoint}
    second = {name: tensor * 1.5 for name, tensor in first.items()}
    n_bytes = sum(tensor.nbytes for tensor in first.values())
    thread = DaemonThread("trainer")
    await engine.start()
    try:
        seconds: dict[str, list[float]] = {name: [] for name in ("copy", *_TRANSPORTS)}
        new_sender = partial(_Sender, registry, thread, options.bucket_mib * 1024**2)
        senders = {name: new_sender() for name in seconds}
        senders[_BY_SOCKETS].sees_memory = False
        for repeat in range(options.repeats + 1):  # the first warms up
            values, others = (first, second)[:: 1 - 2 * (repeat % 2)]
            seconds["copy"].append(_copy_s(first, second))
            senders["disk-delta"] = new_sender()  # which has sent nothing: all weights go
            for name in _TRANSPORTS:
                transport = "distributed" if name == _BY_SOCKETS else name
                sender = senders[name]
                if name in _BY_RANKS:  # a run goes by one transport, whose group stays
                    sender.weights = dict(others)
                    await _update_s(sender, engine, transport, f"{name}-{repeat}-before")
                sender.weights = dict(values)
                seconds[name].append(await _update_s(sender, engine, transport, f"{name}-{repeat}"))
        _report(seconds, n_bytes, options)
        if not options.shape:
            await _report_changes(engine, new_sender(), first, model_path, options)
    finally:
        thread.shutdown(wait=False)
        await engine.close()


def _report(seconds: Mapping[str, list[float]], n_bytes: int, options: argparse.Namespace) -> None:
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    what = f"random weights of the shape {options.shape}" if options.shape else options.model
    print(f"{what}, bfloat16, {n_bytes:,} bytes, median of {options.repeats} updates each:")
    notes = {
        "copy": "a plain copy from memory to memory",
        "nccl": "by gloo",
        "cuda-ipc": "in host memory",
        _BY_SOCKETS: "distributed, as to another machine",
    }
    for name in seconds:
        note = notes.get(name, "")
        spread = f"{min(seconds[name][1:]):.2f} to {max(seconds[name][1:]):.2f}"
        share = medians["copy"] / medians[name]
        print(
            f"  {name:12} {medians[name]:7.3f} s ({spread}) {n_bytes / medians[name] / 1e9:7.2f} GB/s"
            f" {share:7.2f} of the copy's rate  {note}".rstrip()
        )


async def _report_changes(
    engine: SglangEngine, sender: _Sender, start: Weights, model_path: Path, options: argparse.Namespace
) -> None:
    """Send what optimizer steps change, and say how much that is."""
    sender.weights = dict(start)
    await _update_s(sender, engine, "disk-delta", "base")
    n_bytes = sum(tensor.nbytes for tensor in start.values())
    n_elements = sum(tensor.numel() for tensor in start.values())
    print(f"AdamW steps at lr {options.lr:g}, by disk-delta with encoding {options.encoding}:")
    before = dict(start)
    for number, (name, after) in enumerate(_steps(model_path, start, options)):
        sender.weights = dict(after)
        taken = await _update_s(sender, engine, "disk-delta", f"step-{number}")
        sizes = {
            encoding: sum(len(encode_changes(before[key], after[key], encoding)[0]) for key in after)
            for encoding in ("xor", "overwrite")
        }
        changed = sum(int((before[key] != after[key]).sum()) for key in after)
        print(
            f"  {name:32} {changed / n_elements:7.3%} of the elements; {sender.sender.last_bytes:,} bytes, "
            f"{sender.sender.last_bytes / n_bytes:.3%} of full (overwrite {sizes['overwrite'] / n_bytes:.3%}, "
            f"xor {sizes['xor'] / n_bytes:.3%}); {taken:.2f} s"
        )
        before = dict(after)


def _steps(model_path: Path, start: Weights, options: argparse.Namespace) -> Iterator[tuple[str, Weights]]:
    """Yield the bfloat16 weights after each of a few optimizer steps on float32 master weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    masters = {name: parameter for name, parameter in model.named_parameters() if name in start}
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    for number in range(options.steps + 1):
        if number == options.steps:
            _spread(masters)
        texts = [_TEXT.format(number, i, number, i + number, i + number + 1) for i in range(8)]
        tokens = torch.tensor(tokenizer(texts, padding=False, truncation=True, max_length=16)["input_ids"])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        name = f"step {number + 1}" if number < options.steps else "step of a run in progress"
        yield name, {name: master.detach().to(torch.bfloat16) for name, master in masters.items()}


@torch.no_grad()
def _spread(masters: Weights) -> None:
    """Move each master weight to a random place among those that round to the same bfloat16.

    A fresh model's masters are bfloat16 numbers, from which a small step never gets to the next one; after many steps
    they are anywhere in between.
    """
    generator = torch.Generator().manual_seed(0)
    for master in masters.values():
        rounded = master.to(torch.bfloat16)
        above = (rounded.view(torch.int16) + 1).view(torch.bfloat16).float()
        gap = (above - rounded.float()).nan_to_num(0.0, 0.0, 0.0)
        moved = rounded.float() + gap * (torch.rand(master.shape, generator=generator) - 0.5)
        master.copy_(torch.where(moved.to(torch.bfloat16) == rounded, moved, rounded.float()))


async def _update_s(sender: _Sender, engine: SglangEngine, transport: str, version: str) -> float:
    begin = time.perf_counter()
    await sync_weights(sender, engine, version=version, timeout_s=_TIMEOUT_S, transport=transport)  # type: ignore[arg-type]  # only the sending half of a trainer
    return time.perf_counter() - begin


def _copy_s(source: Weights, target: Weights) -> float:
    """Return the seconds of the fastest of a few copies, as others may find memory that the system is still tidying."""
    buffers = {name: torch.empty_like(tensor) for name, tensor in target.items()}
    for buffer in buffers.values():
        buffer.zero_()  # so that its memory is there
    taken = []
    for _ in range(_COPIES):
        begin = time.perf_counter()
        for name, tensor in source.items():
            buffers[name].copy_(tensor)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench weights", description=weights.__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2-135m", help="Hugging Face folder, hub name, or short name")
    model.add_argument("--shape", choices=list(SHAPES), help="random weights in the place of a model")
    parser.add_argument("--repeats", type=int, default=5, help="measured updates by each transport")
    parser.add_argument(
        "--bucket-mib", type=int, default=512, help="MiB of a bucket (--update-weight-buffer-size of a run)"
    )
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps from the model as it is")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of these steps")
    parser.add_argument("--encoding", choices=("xor", "overwrite"), default="xor", help="of changes")
    parser.add_argument("--dir", default=None, help="where the transports that go by the disk write")
    options = parser.parse_args(argv)
    if options.bucket_mib < 1:
        parser.error(f"--bucket-mib {options.bucket_mib}: wanted at least 1")
    return options
