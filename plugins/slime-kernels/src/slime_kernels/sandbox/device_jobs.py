"""Jobs on a device: launching a candidate's kernels for real, and timing it, or the problem's own module.

A header's `device` is `cuda`, in forks of the compiling process, which has not called CUDA; or `cpu`, in forks of the interpreting one,
where Triton's interpreter launches and the CPU's clock tells the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton import knobs
from triton.runtime import driver, interpreter

from slime_kernels.sandbox import problem_jobs
from slime_kernels.sandbox.candidate_jobs import (
    check_surroundings,
    load,
    moved,
    on_device,
    surroundings,
    try_trials,
)
from slime_kernels.sandbox.guards import Guards
from slime_kernels.sandbox.values import tensors_of
from slime_kernels.sandbox.watch import Watch, is_plain, poison
from slime_kernels.timing.clock import CpuClock, DeviceClock
from slime_kernels.timing.measure import TimingPlan, measure

_LEAST_FLUSHED_BYTES = 256 << 20
#: Of each tensor of an answer at full size, so many numbers are told, at places that are drawn.
_N_TOLD = 256
#: Share of the timed calls whose answers are told, and the most of them in each try.
_TOLD_SHARE, _MOST_TOLD = 0.1, 12
#: Share of calls, between the timed ones, that are watched.
_WATCHED_SHARE = 0.1
#: Of the inputs whose memory all others are put into; what of them is no tensor, all calls share.
_FIRST_SEED = 7919
_N_SEEDS = 1 << 31


class CudaClock:
    """Events of CUDA, on the current stream; each flush writes more than the second-level cache holds.

    Its functions are those that torch had when it was made.

    Args:
        cache_bytes: of that cache.
    """

    source = "cuda-events"

    def __init__(self, cache_bytes: int) -> None:
        self._event, self._host = torch.cuda.Event, CpuClock(wait=torch.cuda.synchronize)
        self._record, self._wait, self._elapsed = (
            self._event.record,
            self._event.synchronize,
            self._event.elapsed_time,
        )
        size = max(_LEAST_FLUSHED_BYTES, 2 * cache_bytes)
        self._flushed = torch.empty(size, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        """Write what is never read."""
        self._flushed.zero_()

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = self._event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types there
        self._record(event)
        return event

    def between_us(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Wait for the second event, and return the time between both."""
        self._wait(last)
        return 1e3 * float(self._elapsed(first, last))

    def drain_us(self) -> float:
        """Wait for all streams of the device."""
        return self._host.drain_us()


class Launched:
    """Kernels that a device runs: they are counted where they are recorded, and nothing of what they do is seen.

    Args:
        device: `cuda`, or `cpu`, where the interpreter's launches are counted, for good.
    """

    def __init__(self, device: str) -> None:
        self._device, self.samples = device, cast("int | None", None)
        self.inside = self.sees_stores = False
        self.written: dict[int, NDArray[np.bool_]] = {}
        self._launches: list[dict[str, Any]] = []
        if device == "cpu":
            self._install()

    def _install(self) -> None:
        run = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launches.append({})
            self.inside = True
            try:
                run(executor, *args, **kwargs)
            finally:
                self.inside = False

        interpreter.GridExecutor.__call__ = launch

    @contextmanager
    def recording(self) -> Iterator[list[dict[str, Any]]]:
        """Take down the launches of the block."""
        self._launches, self.written = [], {}
        hooks = knobs.runtime.launch_enter_hook if self._device == "cuda" else None
        if hooks is None:
            yield self._launches
            return
        hooks.add(self._note)
        try:
            yield self._launches
        finally:
            hooks.remove(self._note)

    def _note(self, _: object) -> None:
        self._launches.append({})


def start(header: dict[str, Any]) -> DeviceClock:
    """Begin to use the device, which PyTorch uses with float32 as float32 is, and return its clock."""
    if header["device"] == "cpu":
        return CpuClock()
    torch.cuda.init()
    torch.cuda.set_per_process_memory_fraction(header["memory_share"])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    clock = CudaClock(header["cache_bytes"])
    clock.flush()
    driver.active.get_current_target()  # builds what launches; nothing of that is to be a candidate's fault or time
    clock.drain_us()
    return clock


def launch(header: dict[str, Any], buffers: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Run `ModelNew` on the inputs of each trial on the device; returns what `interpret` does, but which numbers kernels stored."""
    device, clock = header["device"], start(header)
    return try_trials(
        header, buffers, Launched(device), device=device, settle=clock.drain_us, guards=Guards(device)
    )


def time_candidate(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Time `ModelNew` at the problem's own size; returns the measurement, answers of some of the timed calls, and what was seen of others.

    Those others are the first, the last, and drawn ones between the timed ones; nothing tells a candidate which kind a call is.

    Raises:
        TamperError: something of torch, Triton or Python is not what it was.
        BoundsError: a kernel wrote outside what it made.
    """
    clock, work = start(header), Launched(header["device"])
    timed = _Timed(header, clock)
    timed.before = surroundings()
    timed.build(load(header["code"])["ModelNew"])
    timed.work = work
    timed.watch()  # before what has no guards: it may write where this process keeps its own
    measured = timed.measure()
    timed.watch()
    return {"measured": measured, "answers": timed.answers, "watched": timed.watched}, []


def time_problem(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Time `Model` at its own size, or, where that is asked for, what torch.compile makes of it; returns the measurement."""
    timed = _Timed(header, start(header))
    timed.build(timed.names["Model"])
    if header["compile"]:
        timed.model = torch.compile(timed.model)
    return {"measured": timed.measure()}, []


def answer_at_full_size(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Return what `Model` answers at its own size to the inputs of each of `seeds`, as `time_candidate` tells answers."""
    timed = _Timed(header, start(header))
    timed.build(timed.names["Model"])
    for seed in header["seeds"]:
        timed.answer(seed)
    return {"answers": timed.answers}, []


class _Timed:
    """A module that is timed on inputs in one memory that are drawn for each call, as answers to such as come again would be kept."""

    def __init__(self, header: dict[str, Any], clock: DeviceClock) -> None:
        self._clock, self._plan, self._device = clock, TimingPlan(**header["plan"]), header["device"]
        self._draw, self._header = random.Random(header["draws"]), header
        self.names = problem_jobs.load(header["problem"], {})
        torch.manual_seed(0)
        self._given = self.names["get_init_inputs"]()
        self._now, self._seed, self._result = self._inputs(_FIRST_SEED), _FIRST_SEED, None
        self._drawn: list[Any] = []
        self._tells, self._n_told, self._guards = False, 0, Guards(self._device)
        self.model: Any = None
        self.work: Launched | None = None
        """Launches the kernels of what is watched between calls; nothing is where None."""
        self.before: dict[str, dict[str, int]] | None = None
        """What torch, Triton and Python were before the candidate came; nothing is looked at where None."""
        self.answers: list[dict[str, Any]] = []
        self.watched: list[dict[str, Any]] = []
        """What some calls had PyTorch compute, and how many kernels they launched."""

    def _inputs(self, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        with torch.device(self._device):
            return moved(list(self.names["get_inputs"]()), self._device)  # type: ignore[no-any-return]  # a list as it was

    def build(self, module: Any) -> None:
        """Make the module that is timed, with the problem's weights."""
        trial = {"weights": 0, "dtype": "float32"}
        model = problem_jobs.build(module, self._given, trial)
        self._check()
        self.model = on_device(model, self._device)

    def measure(self) -> dict[str, Any]:
        """Return how long a call takes."""
        with torch.no_grad():
            measured = measure(self._call, self._clock, self._plan, before=self._before)
            self._check()
            self._tell()
        return asdict(measured)

    def answer(self, seed: int) -> None:
        """Call the module on the inputs of a seed, and tell its answer."""
        self._put(seed)
        with torch.no_grad():
            self._call()
        self._tell()

    def _call(self) -> None:
        self._result = self.model(*self._now)

    def _check(self) -> None:
        """Check what the last call left, before anything of its answer is read: it could put back meanwhile what it changed."""
        if self.before is not None:
            check_surroundings(self.before, self._result)

    def _before(self, number: int) -> None:
        """Check the last call, tell its answer if that was drawn, and make another call under watch if that was; then make all new."""
        self._check()
        if self._tells and self._n_told < _MOST_TOLD:
            self._n_told += 1
            self._tell()
        if number == 0:  # of another try, whose times may be those that count
            self._n_told = 0
        if self.work is not None and self._draw.random() < _WATCHED_SHARE:
            self.watch()
        self._renew()
        self._clock.drain_us()  # a queue as long as drawing takes would hide what the host does in the call
        self._tells = number >= 0 and self._draw.random() < _TOLD_SHARE

    def watch(self) -> None:
        """Call the module under watch on other inputs, and note what was seen and what it answers."""
        assert self.work is not None
        self._renew()
        with torch.no_grad(), self.work.recording() as launches, Watch(self.work, self._guards) as watch:
            self._call()
            self._check()
            self._clock.drain_us()
        self._guards.check()
        self.watched.append({"delegated": sorted(set(watch.delegated)), "launches": len(launches)})
        self._tell()

    def _renew(self) -> None:
        """Spoil the last answer in its memory, and put other inputs in the place of the last ones."""
        ours = [*self._now, *(self.model.state_dict().values() if self._has_weights() else ())]
        kept = {one.untyped_storage().data_ptr() for one in tensors_of(ours)}
        for one in tensors_of(self._result):
            if one.untyped_storage().data_ptr() not in kept:
                poison(one)
        self._result = None
        self._put(self._draw.randrange(_N_SEEDS))

    def _has_weights(self) -> bool:
        return isinstance(self.model, torch.nn.Module)

    def _put(self, seed: int) -> None:
        self._drawn = []  # before there are others: so much memory there may not be
        self._seed, self._drawn = seed, self._inputs(seed)
        for ours, new in zip(tensors_of(self._now), tensors_of(self._drawn), strict=True):
            ours.copy_(new)

    def _tell(self) -> None:
        """Note some numbers of the last answer, and whether the inputs are what they were."""
        self._clock.drain_us()
        given = zip(tensors_of(self._now), tensors_of(self._drawn), strict=True)
        found = tensors_of(self._result)
        self.answers.append(
            {
                "seed": self._seed,
                "mutated": not all(torch.equal(ours, wanted) for ours, wanted in given),
                "plain": all(map(is_plain, found)),
                "tensors": [_told(one, self._header["places"]) for one in found],
            }
        )


def _told(tensor: Tensor, seed: int) -> dict[str, Any]:
    """Return the shape and the type of a tensor, and numbers of it at places that are drawn."""
    numel = tensor.numel()
    drawn = torch.Generator().manual_seed(seed)
    places = torch.randint(max(1, numel), (min(numel, _N_TOLD),), generator=drawn)
    numbers = tensor.detach().reshape(-1)[places.to(tensor.device)].to("cpu", torch.float64)
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "numbers": numbers.tolist()}
