"""`Verdict`: what became of a candidate, and the envelope in which a service tells it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any


class EvalStatus(enum.StrEnum):
    """How far a candidate came."""

    PENDING = "pending"
    REJECTED = "rejected"
    """The static gate refused it, or it was seen to cheat."""
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    INCORRECT = "incorrect"
    CORRECT = "correct"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    """Nothing is known of it: the evaluation itself failed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast a correct candidate is."""

    source: str
    """What tells it: `cuda-events` where it was timed on a GPU, `cost-model` where nothing was timed."""
    target: str
    """The name of the GPU that it was timed on, or the architecture that was estimated."""
    runtime_us: float
    baseline_us: float
    """Of the module in PyTorch, by the same source."""
    speedup: float
    """baseline over runtime, no more than what the target's bandwidth allows."""
    noise: float = 0.0
    """How far both times are from being known, as a part of them; the larger one."""
    doubt: str = ""
    """Why the speedup is not to be trusted; empty where it is. Nothing is rewarded for one that is not."""
    parts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a candidate."""

    status: EvalStatus
    gate: str
    """The gate that decided: `static`, `compiles`, `correct`, `honest` or `fast`."""
    compiled: bool = False
    correct: bool = False
    message: str = ""
    """Why it went no further, for whoever is to do better."""
    timing: Timing | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    """Each compiled kernel: registers, shared and spilled bytes, by target."""
    reward: float = 0.0

    @property
    def speedup(self) -> float:
        """How fast it is beside PyTorch; 0 where that is not known, or not to be trusted."""
        return 0.0 if self.timing is None or self.timing.doubt else self.timing.speedup

    def envelope(self) -> dict[str, Any]:
        """Return the answer of the service, in the fork's form, with what it lacks under `metadata`."""
        outer = {
            EvalStatus.REJECTED: "rejected",
            EvalStatus.SERVER_ERROR: "failed",
            EvalStatus.TIMEOUT: "failed",
        }.get(self.status, "completed")
        timing = self.timing
        return {
            "eval_status": outer,
            "exec_result": {
                "compiled": self.compiled,
                "correctness": self.correct,
                "runtime": -1.0 if timing is None else timing.runtime_us / 1000,
                "runtime_stats": {} if timing is None else asdict(timing),
                "metadata": {
                    "status": str(self.status),
                    "gate": self.gate,
                    "error_message": self.message,
                    "kernels": self.kernels,
                },
            },
            "reward": self.reward,
        }


def verdict_of(envelope: dict[str, Any]) -> Verdict:
    """Read the answer of a service.

    Raises:
        ValueError: it is none.
    """
    try:
        said = envelope["exec_result"]
        about = said["metadata"]
        stats = said["runtime_stats"]
        return Verdict(
            status=EvalStatus(about["status"]),
            gate=str(about["gate"]),
            compiled=bool(said["compiled"]),
            correct=bool(said["correctness"]),
            message=str(about["error_message"]),
            timing=Timing(**stats) if stats else None,
            kernels=list(about["kernels"]),
            reward=float(envelope["reward"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer that is no verdict ({error!r})") from error
