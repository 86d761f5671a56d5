"""`Asking`: jobs in fresh processes, on a problem's own module or on a candidate, and how an evaluation ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_rm.code.sandbox.running import Limits

from slime_kernels.judge.verdict import EvalStatus
from slime_kernels.sandbox.fork_server import CandidateAnswer, CandidateServer, Kind
from slime_kernels.timing.gpus import KernelDevice


class Ended(Exception):
    """A gate has decided."""

    def __init__(self, status: EvalStatus, gate: str, message: str) -> None:
        super().__init__(message)
        self.status, self.gate, self.message = status, gate, message


class Asking:
    """Has jobs done in the sandbox, and ends an evaluation where one is not.

    Args:
        server: makes the processes.
        limits: what each may use.
    """

    def __init__(self, server: CandidateServer, limits: Limits) -> None:
        self._server, self._limits = server, limits

    def trusted(
        self,
        job: str,
        header: dict[str, Any],
        buffers: Sequence[bytes] = (),
        *,
        gpu: KernelDevice | None = None,
        limits: Limits | None = None,
    ) -> CandidateAnswer:
        """Do a job on a problem's own module, once more where it fails; that is nobody's fault who answered it.

        Raises:
            Ended: it did not answer.
        """
        limits = limits or self._limits
        for _ in range(2):
            answer = self._server.call(kind_of(gpu), job, header, buffers, limits=limits, gpu=gpu)
            if answer.header is not None and "error" not in answer.header:
                return answer
        why = f"ended by {answer.ending} {answer.log[-300:]}"
        if answer.header is not None:
            why = "{kind}: {text}".format(**answer.header["error"])
        raise Ended(EvalStatus.SERVER_ERROR, "problem", f"the problem's own module fails in {job}: {why}")

    def untrusted(
        self,
        kind: Kind,
        job: str,
        header: dict[str, Any],
        buffers: Sequence[bytes],
        gate: str,
        *,
        gpu: KernelDevice | None = None,
        reserves: bool = False,
    ) -> tuple[dict[str, Any], Sequence[bytes]]:
        """Do a job on a candidate, which may be one that `reserves` more addresses than it has memory.

        Raises:
            Ended: it did not answer, or not by itself, or there is no memory for what it is to be given.
        """
        answer = self._server.call(
            kind, job, header, buffers, limits=self._limits, gpu=gpu, reserves=reserves
        )
        if answer.forged:
            raise Ended(EvalStatus.REJECTED, "honest", "wrote where only the evaluator writes")
        if answer.header is not None:
            error = answer.header.get("error", {})
            if job == "compile" and error.get("kind") == "InputsError":  # nothing of the candidate was run
                raise Ended(EvalStatus.SERVER_ERROR, "problem", error["text"])
            return answer.header, answer.buffers
        if answer.ending == "time":
            raise Ended(EvalStatus.TIMEOUT, gate, f"not done within {self._limits.wall_s:g} s")
        why = {"memory": "out of memory", "output": "too much output"}.get(
            answer.ending, "its process ended before it answered"
        )
        raise Ended(EvalStatus.RUNTIME_ERROR, gate, f"{why} {answer.log[-300:]}".strip())


def kind_of(gpu: KernelDevice | None) -> Kind:
    """Return where jobs run: those on a GPU where Triton compiles, all others where it interprets."""
    return "compile" if gpu is not None and gpu.kind == "cuda" else "interpret"
