"""`KernelAttempt`: one turn, and what a policy is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_kernels.judge.verdict import EvalStatus, Verdict, verdict_of

_SHOWN = 800
NO_CODE = "the response has no fenced block of Python"


@dataclass(frozen=True, kw_only=True)
class KernelAttempt:
    """One turn."""

    turn: int
    """From 0."""
    code: str | None
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the history, in the fork's form."""
        verdict = self.verdict
        return {
            "turn_idx": self.turn,
            "kernel_code": self.code,
            "eval_result": {
                "status": str(verdict.status),
                "compiled": verdict.compiled,
                "correctness": verdict.correct,
                "runtime": None if verdict.timing is None else verdict.timing.runtime_us,
                "speedup": None if verdict.timing is None else verdict.speedup,
                "error_message": verdict.message,
            },
            "reward": verdict.reward,
            "envelope": verdict.envelope(),
        }

    def result(self) -> str:
        """Tell what became of it, and what to do next."""
        verdict = self.verdict
        lines = [
            f"Compiled: {'yes' if verdict.compiled else 'no'}",
            f"Correct: {'yes' if verdict.correct else 'no'}",
        ]
        if verdict.timing is not None:
            lines.append(f"Runtime: {verdict.timing.runtime_us:.1f} us ({verdict.timing.source})")
            lines.append(f"Speedup: {verdict.timing.speedup:.2f}")
        if verdict.message:
            lines.append(f"Error ({verdict.status}): {verdict.message[:_SHOWN]}")
        lines.append("Make it faster." if verdict.correct else "Fix it.")
        return "\n".join(lines)


def attempt_from(entry: Mapping[str, Any]) -> KernelAttempt:
    """Return the attempt of an entry of a history."""
    verdict = verdict_of(dict(entry["envelope"]))
    return KernelAttempt(turn=entry["turn_idx"], code=entry["kernel_code"], verdict=verdict)


def feedback(attempt: KernelAttempt, *, skeleton: bool = False) -> str:
    """Return what follows an attempt in a chat; with `skeleton` only what is missing in one is wanted."""
    wanted = "what goes there, again" if skeleton else "the whole module again, in one fenced block of Python"
    return f"{attempt.result()} Answer with {wanted}."


def with_history(text: str, attempts: Sequence[KernelAttempt]) -> str:
    """Return a prompt with all earlier attempts and what became of them."""
    parts = [text]
    for one in attempts:
        code = one.code if one.code is not None else f"({NO_CODE})"
        parts.append(f"Previous attempt {one.turn + 1}:\n\n```python\n{code.strip()}\n```\n\n{one.result()}")
    return "\n\n".join(parts)


def no_code() -> Verdict:
    """Return the verdict on a response without a candidate."""
    return Verdict(status=EvalStatus.REJECTED, gate="static", message=NO_CODE)
