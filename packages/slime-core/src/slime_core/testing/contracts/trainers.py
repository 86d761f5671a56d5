"""Kit of trainers: behaviour over the protocol, on a model of the caller's, small enough to train at once."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from slime_core.errors import CheckpointError, TrainerError
from slime_core.protocols import Fingerprint, OffloadsWeights, Trainer, TrainerCapabilities, TransferPlan
from slime_core.samples import TrainBatch
from slime_core.testing.contracts.promises import answering, refusing, require, run_within
from slime_core.weights.sync import MemoryChannel

_MEMBERS = (
    "capabilities", "start", "train", "send", "save", "written", "load", "save_hf", "offload", "onload", "close",
)  # fmt: skip


def check_trainer(
    create: Callable[[], Trainer], folder: Path, *, batch: TrainBatch | None = None, dtype: str = "float32"
) -> None:
    """Check a trainer: capabilities, metrics, a checkpoint from which another goes on exactly, memory, two closes.

    Batches are read-only memory, as ranks of a machine share it, and must not have changed when it has trained.

    Args:
        create: builds one, not started, each time alike.
        folder: an empty one.
        batch: to train on; `small_batch()` when not given.
        dtype: in which weights are sent and compared, where it can send by `memory`.

    Raises:
        ContractError: says which promise is broken.
    """
    given = small_batch() if batch is None else batch
    first = run_within("trainer", _first(create, folder, given, dtype))
    if first is not None:
        run_within("trainer", _second(create, folder, given, dtype, first))


def small_batch(*, step: int = 1, n_ids: int = 26, seed: int = 0) -> TrainBatch:
    """Return two groups of two samples, of ids below `n_ids`, in one optimizer step that weighs all tokens alike."""
    rng = np.random.default_rng(seed)
    prompts, responses = np.array([2, 3, 2, 4]), np.array([3, 1, 4, 2])
    n_tokens, n_trained = int((prompts + responses).sum()), int(responses.sum())
    rewards = np.array([1, -1, 0.5, -0.5], dtype=np.float32)

    def offsets(lengths: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    return TrainBatch(
        step=step,
        tokens=rng.integers(0, n_ids, n_tokens).astype(np.int32),
        offsets=offsets(prompts + responses),
        response_offsets=offsets(responses),
        loss_mask=np.ones(n_trained, dtype=np.float32),
        rollout_log_probs=np.full(n_trained, -math.log(n_ids), dtype=np.float32),
        teacher_log_probs=None,
        rewards=rewards,
        raw_rewards=rewards.copy(),
        sample_ids=np.arange(4),
        group_ids=np.array([0, 0, 1, 1]),
        rollout_ids=np.arange(4),
        truncated=np.zeros(4, dtype=bool),
        optimizer_steps=(np.arange(4),),
        weights=np.full(n_trained, 1 / n_trained, dtype=np.float32),
        temperature=1.0,
    )


async def _first(
    create: Callable[[], Trainer], folder: Path, batch: TrainBatch, dtype: str
) -> tuple[dict[str, float], Fingerprint] | None:
    """Train, save, and train once more; returns what came of that, None of a trainer that does not learn."""
    with answering("trainer", "one that is built, not started"):
        trainer = create()
    where = f"trainer {type(trainer).__name__}"
    missing = [name for name in _MEMBERS if not hasattr(trainer, name)]
    require(not missing, where, found=f"no {', '.join(missing)}", wanted="every method of Trainer")
    before = trainer.capabilities
    known = isinstance(before, TrainerCapabilities)
    require(known, where, found=f"capabilities of {type(before).__name__}", wanted="TrainerCapabilities")
    try:
        with answering(where, "a trainer that starts"):
            await trainer.start()
        same = trainer.capabilities == before
        require(same, f"{where}: start", found="other capabilities than before", wanted="the same")
        if not before.learns:
            await refusing(f"{where}: train, which it says it does not", trainer.train(batch), TrainerError)
            return None
        await _train(where, trainer, batch)
        await _save(where, trainer, folder / "saved")
        with answering(f"{where}: offload and onload", "memory given up and taken back"):
            await trainer.offload()
            if trainer.capabilities.offloads_weights:
                first = cast(OffloadsWeights, trainer)
                await first.offload_weights()
                await first.onload_weights()
                await first.offload_weights()
            await trainer.onload()
        return await _train(where, trainer, batch), await _weights(where, trainer, dtype)
    finally:
        with answering(f"{where}: close", "that it may be called twice"):
            await trainer.close()
            await trainer.close()


async def _save(where: str, trainer: Trainer, path: Path) -> None:
    hf, background = path.with_name("hf"), path.with_name("background")
    path.mkdir()
    with answering(f"{where}: save", "folders with its state"):
        await trainer.save(path)
        await trainer.save_hf(hf, merged=True)
        if trainer.capabilities.background_save:
            background.mkdir()
            await trainer.save(background, in_background=True)
            done = await trainer.written(wait=True)
            require(done is True, f"{where}: written(wait=True)", found=done, wanted="True")
    for written in (path, hf):
        require(any(written.iterdir()), f"{where}: save", found="an empty folder", wanted="files")


async def _second(
    create: Callable[[], Trainer],
    folder: Path,
    batch: TrainBatch,
    dtype: str,
    first: tuple[dict[str, float], Fingerprint],
) -> None:
    """Go on from what the first saved, and compare."""
    trainer = create()
    where = f"trainer {type(trainer).__name__}"
    (folder / "nothing").mkdir()
    names = ["saved", "background"] if trainer.capabilities.background_save else ["saved"]
    try:
        await trainer.start()
        await refusing(f"{where}: load of an empty folder", trainer.load(folder / "nothing"), CheckpointError)
        for name in names:
            with answering(f"{where}: load", "what save wrote"):
                await trainer.load(folder / name)
            metrics, weights = await _train(where, trainer, batch), await _weights(where, trainer, dtype)
            found = f"a loss of {metrics.get('train/loss')} after load, {first[0].get('train/loss')} without"
            same = metrics.get("train/loss") == first[0].get("train/loss")
            require(same, f"{where}: load({name})", found=found, wanted="training that goes on exactly")
            found = "weights that differ a step after load"
            require(weights == first[1], f"{where}: load({name})", found=found, wanted="the same")
    finally:
        await trainer.close()


async def _train(where: str, trainer: Trainer, batch: TrainBatch) -> dict[str, float]:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    memory = [bytearray(buffer.raw()) for buffer in buffers]
    shared = pickle.loads(pickled, buffers=[memoryview(part).toreadonly() for part in memory])
    with answering(f"{where}: train", "metrics"):
        metrics = await trainer.train(shared)
    same = memory == [bytearray(buffer.raw()) for buffer in buffers]
    require(
        same, f"{where}: train", found="a batch that it has written to", wanted="copies of what is changed"
    )
    odd = {name: value for name, value in metrics.items() if not isinstance(value, float | int)}
    odd |= {name: value for name, value in metrics.items() if not name.startswith(("train/", "perf/"))}
    require(
        not odd, f"{where}: train", found=f"the metrics {odd}", wanted="numbers named train/... or perf/..."
    )
    loss = metrics.get("train/loss", 0.0)
    require(math.isfinite(loss), f"{where}: train", found=f"train/loss {loss}", wanted="a finite number")
    return metrics


async def _weights(where: str, trainer: Trainer, dtype: str) -> Fingerprint:
    """Return the fingerprint of its weights; empty where it cannot send by `memory`."""
    if "memory" not in trainer.capabilities.transports:
        return {}
    plan = TransferPlan(transport="memory", version="1", dtype=dtype, channel=MemoryChannel())

    async def drain() -> list[str]:
        return [name async for bucket in plan.channel.buckets() for name, _ in bucket]

    with answering(f"{where}: send", "every tensor in the plan's channel"):
        sent, names = await asyncio.gather(trainer.send(plan), drain())
    same = sorted(names) == sorted(sent)
    require(
        same, f"{where}: send", found=f"{len(names)} tensors for {len(sent)} fingerprints", wanted="one each"
    )
    return sent
