"""Trials: with which shapes, types and seeds a candidate is tried."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from slime_kernels.problems.problem import KernelProblem

_SCALE = 1.5


def trials_of(
    problem: KernelProblem, source: str, facts: Mapping[str, Any], *, n_trials: int, seed: int
) -> list[dict[str, Any]]:
    """Return the trials of a candidate: at least two of the first shape, and one of each other shape and type.

    Seeds follow from the problem, the candidate's source and `seed`: the same each time, and none that a candidate can know, as
    they would change with it. Where the problem allows, every other trial has larger inputs.
    """
    kinds = [(shape, dtype) for dtype in problem.dtypes for shape in facts["shapes"]]
    number_of = [max(1, n_trials // len(kinds))] * len(kinds)
    number_of[0] = max(2, number_of[0], n_trials - sum(number_of[1:]))
    trials: list[dict[str, Any]] = []
    for group, ((shape, dtype), number) in enumerate(zip(kinds, number_of, strict=True)):
        for one in range(number):
            scale = _SCALE if facts["scalable"] and one % 2 else 1.0
            trials.append(
                {
                    "constants": dict(shape),
                    "dtype": dtype,
                    "group": group,
                    "scale": scale,
                    "weights": _drawn(problem.code, source, seed, "weights", group),
                    "seed": _drawn(problem.code, source, seed, "inputs", len(trials)),
                }
            )
    return trials


def whole_trial(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the problem at its own size, with inputs whose numbers do not matter."""
    return {
        "constants": {},
        "dtype": "float32",
        "group": 0,
        "scale": 1.0,
        "weights": 0,
        "seed": 0,
        "inputs": facts["inputs"],
        "given": facts["given"],
    }


def _drawn(*parts: str | int) -> int:
    digest = hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def batches(forms: Sequence[Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return trials with their inputs."""
    return [{**trial, **form} for trial, form in zip(trials, forms, strict=True)]
