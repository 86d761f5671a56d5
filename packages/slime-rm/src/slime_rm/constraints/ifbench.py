"""The reward `ifbench`: whether a response keeps to the constraints that its prompt sets."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_origin, get_type_hints

from slime_core.errors import SampleError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.constraints.form import FORM
from slime_rm.constraints.length import LENGTH
from slime_rm.constraints.wording import WORDING
from slime_rm.text.thought import after_thought

#: Constraint id -> check(response, **arguments) -> whether the response keeps to it.
CONSTRAINTS: Mapping[str, Callable[..., bool]] = {**FORM, **LENGTH, **WORDING}


def ifbench(sample: Sample) -> Grade:
    """Score 1.0 when the response keeps to every constraint, else 0.0; the part `share` is the share it keeps to.

    Metadata as in IFEval and IFBench data: `instruction_id_list`, ids such as `punctuation:no_comma`, and `kwargs`,
    the arguments of each (entries that are None are left out). An empty response keeps to nothing, nor does one that is cut off in its
    thought (`<think>` without `</think>`); a thought and special tokens at the end are no part of a response.

    Raises:
        SampleError: metadata lacks the ids, an id is unknown, or its arguments are not those that it takes.

    Source: IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833); the checks are ours, nothing is downloaded.
    """
    response = _solution(sample.response)
    kept = {}
    for number, (name, arguments) in enumerate(_constraints(sample)):
        check = _check_of(sample, name, arguments)
        _check_types(sample, name, arguments, get_type_hints(check))
        try:
            kept[f"{number} {name}"] = bool(response.strip()) and check(response, **arguments)
        except ValueError as error:
            raise SampleError(f"{sample.name}: constraint {name} with {arguments}: {error}") from error
    share = sum(kept.values()) / len(kept)
    return Grade(score=float(share == 1.0), parts={"share": share}, details={"kept": kept})


def _solution(response: str) -> str:
    """Return what is behind the thought, without blanks before it; nothing where the thought never ends."""
    solution = after_thought(response) or ""
    return up_to_special_tokens(solution if solution == response else solution.lstrip())


def _constraints(sample: Sample) -> list[tuple[str, dict[str, Any]]]:
    names = sample.metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise SampleError(
            f"{sample.name}: metadata['instruction_id_list'] is {names!r}; wanted the ids of the constraints"
        )
    arguments = sample.metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise SampleError(
            f"{sample.name}: metadata['kwargs'] is {arguments!r}; wanted a dict for each of {len(names)} constraints"
        )
    return [
        (name, {key: value for key, value in (given or {}).items() if value is not None})
        for name, given in zip(names, arguments, strict=True)
    ]


def _check_of(sample: Sample, name: str, arguments: Mapping[str, Any]) -> Callable[..., bool]:
    check = CONSTRAINTS.get(name)
    if check is None:
        near = difflib.get_close_matches(name, CONSTRAINTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"ifbench has {', '.join(sorted(CONSTRAINTS))}"
        raise SampleError(f"{sample.name}: no constraint is named {name!r}; {hint}")
    try:
        inspect.signature(check).bind("", **arguments)
    except TypeError as error:
        raise SampleError(
            f"{sample.name}: constraint {name} is given {sorted(arguments)}, it takes {inspect.signature(check)} ({error})"
        ) from error
    return check


def _check_types(sample: Sample, name: str, arguments: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for key, value in arguments.items():
        wanted = get_origin(hints[key]) or hints[key]
        fits = (
            value == int(value) if wanted is int and isinstance(value, float) else isinstance(value, wanted)
        )
        if not fits or isinstance(value, bool):  # Parquet may hold integers as floats
            raise SampleError(
                f"{sample.name}: constraint {name}: {key} is {value!r}; wanted {wanted.__name__}"
            )
