"""Jobs on a device: launching a candidate's kernels for real, and timing it, or the problem's own module.

A header's `device` is `cuda`, in forks of the compiling process, which has not called CUDA; or `cpu`, in forks of the interpreting one,
where Triton's interpreter launches and the CPU's clock tells the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

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
from slime_kernels.sandbox.values import tensors_of
from slime_kernels.sandbox.watch import is_plain, poison
from slime_kernels.timing.clock import Clock, CpuClock
from slime_kernels.timing.measure import Plan, measure

_LEAST_FLUSHED_BYTES = 256 << 20
#: Of each tensor of an answer at full size, so many numbers are told, at places that are drawn.
_N_TOLD = 256
#: Share of the timed calls whose answers are told, and the most of them.
_TOLD_SHARE, _MOST_TOLD = 0.1, 12


class CudaClock:
    """Events of CUDA, on the current stream; each flush writes more than the second-level cache holds.

    Its functions are those that torch had when it was made.

    Args:
        cache_bytes: of that cache.
    """

    source = "cuda-events"

    def __init__(self, cache_bytes: int) -> None:
        self._event, self._host = torch.cuda.Event, CpuClock(wait=torch.cuda.synchronize)
        size = max(_LEAST_FLUSHED_BYTES, 2 * cache_bytes)
        self._flushed = torch.empty(size, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        """Write what is never read."""
        self._flushed.zero_()

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = self._event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types there
        event.record()
        return event

    def between_us(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Wait for the second event, and return the time between both."""
        last.synchronize()
        return 1e3 * float(first.elapsed_time(last))

    def drain_us(self) -> float:
        """Wait for all streams of the device."""
        return self._host.drain_us()


class Launched:
    """Kernels that a device runs: they are counted, and nothing of what they do is seen."""

    def __init__(self) -> None:
        self.samples: int | None = None
        self.inside = self.sees_stores = False
        self.written: dict[int, NDArray[np.bool_]] = {}
        self._launches: list[dict[str, Any]] = []

    def install(self, device: str) -> None:
        """Have each launch noted, for good."""
        if device == "cuda":
            knobs.runtime.launch_enter_hook.add(lambda _: self._launches.append({}))
            return
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
        yield self._launches


def start(header: dict[str, Any]) -> Clock:
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
    clock, work = start(header), Launched()
    work.install(header["device"])
    return try_trials(header, buffers, work, device=header["device"], settle=clock.drain_us)


def time_candidate(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Time `ModelNew` at the problem's own size; returns the measurement and answers of some of the timed calls."""
    clock, before = start(header), surroundings()
    timed = _Timed(header, clock)
    timed.build(load(header["code"])["ModelNew"])
    measured = timed.measure()
    check_surroundings(before)
    return {"measured": measured, "answers": timed.answers}, []


def time_problem(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Time `Model` at its own size, as it is and by torch.compile where that is asked for; returns measurements and answers."""
    timed = _Timed(header, start(header))
    timed.build(timed.names["Model"])
    found: dict[str, Any] = {"eager": timed.measure(), "answers": timed.all_answers()}
    if header["compile"]:
        timed.model = torch.compile(timed.model)
        try:
            found["compile"] = timed.measure()
        except Exception as error:  # of the compiler: the module itself has run
            found["compile"] = {"error": f"{type(error).__name__}: {error}"[-500:]}
    return found, []


class _Timed:
    """A module that is timed on inputs of two kinds, which change between calls in the same memory, as answers would be kept otherwise."""

    def __init__(self, header: dict[str, Any], clock: Clock) -> None:
        self._clock, self._plan, self._device = clock, Plan(**header["plan"]), header["device"]
        self._draw, self._header = random.Random(header["draws"]), header
        self.names = problem_jobs.load(header["problem"], {})
        torch.manual_seed(0)
        self._given = self.names["get_init_inputs"]()
        self._kinds = [self._inputs(seed) for seed in header["seeds"]]
        self._now = moved(self._inputs(header["seeds"][0]), self._device)
        self._kind, self._result = 0, None
        self._tells = False
        self.model: Any = None
        self.answers: list[dict[str, Any]] = []

    def _inputs(self, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        with torch.device(self._device):
            return moved(list(self.names["get_inputs"]()), self._device)  # type: ignore[no-any-return]  # a list as it was

    def build(self, module: Any) -> None:
        """Make the module that is timed, with the problem's weights."""
        trial = {"weights": 0, "dtype": "float32"}
        self.model = on_device(problem_jobs.build(module, self._given, trial), self._device)

    def measure(self) -> dict[str, Any]:
        """Return how long a call takes."""
        with torch.no_grad():
            measured = measure(self._call, self._clock, self._plan, before=self._before)
            self._tell()
        return asdict(measured)

    def all_answers(self) -> list[dict[str, Any]]:
        """Return an answer for each kind of inputs."""
        self.answers = []
        for kind in range(len(self._kinds)):
            self._put(kind)
            with torch.no_grad():
                self._call()
            self._tell()
        return self.answers

    def _call(self) -> None:
        self._result = self.model(*self._now)

    def _before(self, number: int) -> None:
        """Tell the last call's answer if that was drawn, spoil it, and put other inputs in the place of the last ones."""
        if self._tells and len(self.answers) < _MOST_TOLD:
            self._tell()
        ours = [*self._now, *(self.model.state_dict().values() if self._has_weights() else ())]
        kept = {one.untyped_storage().data_ptr() for one in tensors_of(ours)}
        for one in tensors_of(self._result):
            if one.untyped_storage().data_ptr() not in kept:
                poison(one)
        self._result = None
        self._put(self._draw.randrange(len(self._kinds)))
        self._tells = number >= 0 and self._draw.random() < _TOLD_SHARE

    def _has_weights(self) -> bool:
        return isinstance(self.model, torch.nn.Module)

    def _put(self, kind: int) -> None:
        self._kind = kind
        for ours, new in zip(tensors_of(self._now), tensors_of(self._kinds[kind]), strict=True):
            ours.copy_(new)

    def _tell(self) -> None:
        """Note some numbers of the last answer, and whether the inputs are what they were."""
        self._clock.drain_us()
        given = zip(tensors_of(self._now), tensors_of(self._kinds[self._kind]), strict=True)
        found = tensors_of(self._result)
        self.answers.append(
            {
                "kind": self._kind,
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
