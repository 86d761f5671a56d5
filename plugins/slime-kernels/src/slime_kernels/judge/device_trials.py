"""`DeviceTrials`: candidates launched on a device, and timed there beside what PyTorch does."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from slime_rm.code.sandbox.running import Limits, SandboxError

from slime_kernels.judge.asking import Asking, Ended, kind_of
from slime_kernels.judge.compare import same_at_places
from slime_kernels.judge.verdict import EvalStatus, Timing
from slime_kernels.problems.problem import KernelProblem
from slime_kernels.timing.baselines import Baselines
from slime_kernels.timing.gpus import Devices, KernelDevice
from slime_kernels.timing.measure import MODULE_S, TimingPlan

#: Kind of device -> the name under which records have its times.
SOURCES = {"cuda": "cuda-events", "cpu": "cpu-clock"}
Baseline = Literal["eager", "compile"]
_COMPILER_BYTES = 8 << 30
#: Characters of why torch.compile fails.
_MOST_TOLD = 1000
_OTHER_THINGS = "does other things at full size than in the trials"


#: A kernel that is right, and what it is given: if it does not run in the sandbox, no candidate can.
_PROBE = """
import torch, triton, triton.language as tl
@triton.jit
def double(x, y, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, 2 * tl.load(x + at))
class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        double[(1,)](x, y, x.numel())
        return y
"""
_GIVEN = np.arange(1, 5, dtype=np.float32)
_TRIAL = {
    "inputs": {"list": [{"dtype": "float32", "shape": [4], "buffer": 0}]}, "given": {"list": []},
    "constants": {}, "dtype": "float32", "group": 0, "weights": 0, "seed": 0,
}  # fmt: skip


class DeviceTrials:
    """Launches and times on devices in turn: beside others where it tries, alone where it times. Threads may use one.

    Args:
        asking: has jobs done.
        limits: of those processes.
        devices: one or more.
        baselines: times of PyTorch.
        plan: how calls are timed.
        baseline: which time of PyTorch a speedup is over.
        compiles: torch.compile is timed as well; it is where `baseline` wants it.
        memory_share: part of a device's memory that a process has which tries a candidate, while others do.
    """

    def __init__(
        self,
        asking: Asking,
        limits: Limits,
        devices: Devices,
        *,
        baselines: Baselines,
        plan: TimingPlan,
        baseline: Baseline,
        compiles: bool,
        memory_share: float,
    ) -> None:
        self.asking, self.limits, self.baselines = asking, limits, baselines
        self.plan, self.baseline, self.memory_share = plan, baseline, memory_share
        self.compiles = compiles or baseline == "compile"
        self._devices, self._checked, self._lock = devices, set[KernelDevice](), threading.Lock()

    def take(self) -> OnGpu:
        """Return the next device, for one evaluation.

        Raises:
            SandboxError: a kernel that is right does not run on it in the sandbox.
        """
        on = OnGpu(self, self._devices.take())
        with self._lock:
            if on.gpu not in self._checked:
                on.check()
                self._checked.add(on.gpu)
        return on


@dataclass(frozen=True)
class OnGpu:
    """One evaluation on a device."""

    trials: DeviceTrials
    gpu: KernelDevice

    def check(self) -> None:
        """Run a kernel that is right; raises SandboxError where it does not answer what it should."""
        try:
            said, found = self.launch({"code": _PROBE, "trials": [_TRIAL]}, [_GIVEN.tobytes()])
            why = str(said.get("error", "another answer than it should"))
            if "trials" in said and list(found) == [(2 * _GIVEN).tobytes()]:
                return
        except Ended as error:
            why = error.message
        raise SandboxError(
            f"{self.gpu.name}: a kernel that is right does not run in the sandbox ({why}); kernels.device = 'cpu' needs no GPU"
        )

    def launch(
        self, header: Mapping[str, Any], buffers: Sequence[bytes]
    ) -> tuple[dict[str, Any], Sequence[bytes]]:
        """Run the trials of a candidate; raises Ended where it does not answer, or launches nothing in one."""
        share = self.trials.memory_share
        with self.gpu.used(alone=False):
            said, found = self.trials.asking.untrusted(
                kind_of(self.gpu),
                "launch",
                self._header(share) | dict(header),
                buffers,
                "correct",
                gpu=self.gpu,
            )
        for number, trial in enumerate(said.get("trials", ())):
            if not trial["launches"]:
                raise Ended(EvalStatus.REJECTED, "honest", f"launches no kernel in trial {number}")
        return said, found

    def time(self, problem: KernelProblem, code: str, facts: Mapping[str, Any]) -> Timing:
        """Time a candidate at the problem's own size, and hold it against PyTorch's time and what the memory's bandwidth allows.

        Raises:
            Ended: it answers otherwise there than the module does, fails, or does not answer.
        """
        trials = self.trials
        # Before the device is taken: others of its name may be timing the same module, and nothing is to wait for them meanwhile.
        record = trials.baselines.get(self.gpu, problem.code, lambda: self._baseline(problem))
        with self.gpu.used(alone=True):
            work = self._work(problem) | {"places": secrets.randbits(32)}
            header = work | {"code": code, "draws": secrets.randbits(32)}
            said, _ = trials.asking.untrusted(kind_of(self.gpu), "time", header, (), "fast", gpu=self.gpu)
            self._hold_against_model(said, work)
        return self.timing(said["measured"], record, facts["least_bytes"])

    def _hold_against_model(self, said: Mapping[str, Any], work: Mapping[str, Any]) -> None:
        """Compare what a candidate did at full size with what the module does there.

        Raises:
            Ended: it does otherwise, or failed.
        """
        if "error" in said:
            kind, text = said["error"]["kind"], said["error"]["text"]
            if kind == "TamperError":
                raise Ended(EvalStatus.REJECTED, "honest", text)
            if kind == "BoundsError":
                raise Ended(EvalStatus.REJECTED, "honest", f"{_OTHER_THINGS}: {text}")
            raise Ended(EvalStatus.CORRECT, "fast", f"not timed: {kind}: {text[:300]}")
        for seen in said["watched"]:
            if seen["delegated"] or not seen["launches"]:
                why = f"PyTorch computes {', '.join(seen['delegated'])}" if seen["delegated"] else "no kernel"
                raise Ended(EvalStatus.REJECTED, "honest", f"{_OTHER_THINGS}: {why}")
        answers = said["answers"]
        if any(not answer["plain"] or answer["mutated"] for answer in answers):
            raise Ended(EvalStatus.REJECTED, "honest", _OTHER_THINGS)
        header = {**work, "draws": 0, "seeds": [answer["seed"] for answer in answers]}
        asked = self.trials.asking.trusted(
            "answer-at-full-size", header, gpu=self.gpu, limits=self._long_limits()
        )
        assert asked.header is not None
        for answer, wanted in zip(answers, asked.header["answers"], strict=True):
            if differs := same_at_places(answer["tensors"], wanted["tensors"]):
                raise Ended(EvalStatus.REJECTED, "honest", f"{_OTHER_THINGS}: {differs}")

    def timing(self, found: Mapping[str, Any], record: Mapping[str, Any], least_bytes: int) -> Timing:
        """Return the record of a time beside PyTorch's.

        Raises:
            Ended: there is no time of PyTorch to hold it against.
        """
        which = self.trials.baseline
        baseline = record[which]
        if "error" in baseline:
            raise Ended(
                EvalStatus.CORRECT, "fast", f"not timed: torch.compile fails: {baseline['error'][:300]}"
            )
        runtime, least = float(found["median_us"]), least_bytes / self.gpu.bytes_per_us
        if not 0 < runtime < math.inf:
            raise Ended(EvalStatus.REJECTED, "honest", f"a time of {runtime} us")
        noise, bound = max(found["noise"], baseline["noise"]), self.trials.plan.most_noise
        doubt = f"noise of {noise:.1%} after {found['tries']} tries; wanted at most {bound:.1%}"
        parts = {"least_us": least, "implausible": runtime < least, "over": which, "samples": found["n"]}
        parts |= {
            f"{name}_us": record[name].get("median_us") for name in ("eager", "compile") if name in record
        }
        parts |= {"compile_error": why} if (why := record.get("compile", {}).get("error")) else {}
        return Timing(
            source=SOURCES[self.gpu.kind],
            target=self.gpu.name,
            runtime_us=runtime,
            baseline_us=baseline["median_us"],
            speedup=baseline["median_us"] / max(runtime, least),
            noise=noise,
            doubt=doubt if noise > bound else "",
            parts=parts,
        )

    def _header(self, share: float) -> dict[str, Any]:
        return {"device": self.gpu.kind, "cache_bytes": self.gpu.cache_bytes, "memory_share": share}

    def _work(self, problem: KernelProblem) -> dict[str, Any]:
        """Return what is timed, alone on the device."""
        return self._header(1.0) | {"problem": problem.code, "plan": asdict(self.trials.plan)}

    def _long_limits(self) -> Limits:
        return replace(self.trials.limits, wall_s=MODULE_S, cpu_s=int(MODULE_S))

    def _baseline(self, problem: KernelProblem) -> dict[str, Any]:
        """Time PyTorch alone on the device, and in a process of its own torch.compile, as that may end it."""
        with self.gpu.used(alone=True):
            return self._timed(problem)

    def _timed(self, problem: KernelProblem) -> dict[str, Any]:
        header, limits = self._work(problem) | {"draws": 0, "places": 0}, self._long_limits()
        asking, record = self.trials.asking, dict[str, Any]()
        said = asking.trusted("time-problem", header | {"compile": False}, gpu=self.gpu, limits=limits)
        record["eager"] = (said.header or {})["measured"]
        if self.trials.compiles:  # what it builds takes files of hundreds of megabytes
            memory = max(limits.memory_bytes, _COMPILER_BYTES)
            limits = replace(limits, disk_bytes=_COMPILER_BYTES // 4, memory_bytes=memory)
            try:
                said = asking.trusted("time-problem", header | {"compile": True}, gpu=self.gpu, limits=limits)
                record["compile"] = (said.header or {})["measured"]
            except Ended as error:
                record["compile"] = {"error": error.message[:_MOST_TOLD]}
        return record
