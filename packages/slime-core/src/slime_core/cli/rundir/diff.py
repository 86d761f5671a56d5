"""`slime diff RUN RUN`: the first step, sample and token in which two runs differ."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.cli.arguments import no_run
from slime_core.cli.rundir.samples import ranges
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir

#: What is compared of a sample, in the order in which it comes to be, and whether it is one number a token of the response.
_FIELDS = (
    ("prompt", False), ("tokens", False), ("rollout_log_probs", True), ("loss_mask", True), ("status", False), ("reward", False),
    ("weight_versions", False), ("remove_sample", False), ("label", False),
)  # fmt: skip
#: Metrics that are the same where the same was trained.
_TRAINED = "train/"


def main(argv: list[str]) -> int:
    """Run the subcommand: exit status 1 if the runs differ."""
    parser = argparse.ArgumentParser(
        prog="slime diff",
        allow_abbrev=False,
        description="Compare two runs step by step: their samples, token by token, then the trainer's metrics. Says where they first "
        "differ. Exit status 1 if they do.",
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of a run")
    runs = [RunDir(path) for path in parser.parse_args(argv).runs]
    for run in runs:
        if not os.path.isdir(run.path / "rollouts"):
            raise ConfigError([no_run("slime diff", run.path, lacks="rollouts")])
    found = first_difference(*runs)
    print(found if found is not None else f"no difference in {len(common_steps(*runs))} steps")
    return 0 if found is None else 1


def first_difference(one: RunDir, other: RunDir) -> str | None:
    """Return where two runs first differ, in words; None where all steps that both have are the same."""
    metrics = [run.metrics_of_steps() for run in (one, other)]
    for step in common_steps(one, other):
        files = [run.rollout_file(step) for run in (one, other)]
        for rows in itertools.zip_longest(*(read_records(file, tell=_refuse) for file in files)):
            if found := _of_samples(*rows):
                return f"step {step}, {found}"
        if all(step in table for table in metrics) and (
            found := _of_metrics(*(table[step] for table in metrics))
        ):
            return f"step {step}: the samples are the same, and {found}"
    for run, more in ((one, other), (other, one)):
        lacks = sorted(more.rollout_files().keys() - run.rollout_files().keys())
        if lacks:
            return f"{run.path} has no samples of {_steps(lacks)}, and the other has; those that both have are the same"
    return None


def common_steps(one: RunDir, other: RunDir) -> list[int]:
    """Return the steps whose samples both runs have.

    Raises:
        ConfigError: there are none.
    """
    steps = [list(run.rollout_files()) for run in (one, other)]
    common = sorted(set(steps[0]).intersection(steps[1]))
    if not common:
        found = ", and ".join(
            f"{run.path} has {_steps(has)}" for run, has in zip((one, other), steps, strict=True)
        )
        raise ConfigError([Problem("slime diff", found, "runs with a step in common")])
    return common


def _steps(steps: list[int]) -> str:
    """Say which steps: `step 3`, `steps 1 to 4, 7`, `no step`."""
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {ranges(steps)}"


def _of_samples(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str | None:
    """Return how two samples differ."""
    if one is None or other is None:
        row = one or other or {}
        return f"sample {row.get('index')}: only {'the first' if one else 'the second'} run has it"
    if one.get("index") != other.get("index"):
        return f"sample {one.get('index')}: in its place the second run has sample {other.get('index')}"
    for name, is_of_response in _FIELDS:
        first, second = one.get(name), other.get(name)
        if first == second or (first != first and second != second):
            continue
        where = f"sample {one.get('index')}"
        if (
            not isinstance(first, list)
            or not isinstance(second, list)
            or name in ("prompt", "weight_versions")
        ):
            return f"{where}: {name} is {_shown(first)} in the first run, and {_shown(second)} in the second"
        pairs = enumerate(itertools.zip_longest(first, second))
        at = next((i for i, (a, b) in pairs if a != b and (a == a or b == b)), None)
        if at is None:  # NaN at the same places
            continue
        n_prompt = len(one.get("tokens") or ()) - int(one.get("response_length") or 0)
        return f"{where}, {_token(at if is_of_response else at - n_prompt, n_prompt)}: {name} is {_at(first, at)} in the first run, and {_at(second, at)} in the second"
    return None


def _token(position: int, n_prompt: int) -> str:
    """Say which token: counted from 0 in the response, or in the prompt."""
    return (
        f"token {position} of the response" if position >= 0 else f"token {position + n_prompt} of the prompt"
    )


def _at(values: Sequence[Any], position: int) -> str:
    return repr(values[position]) if position < len(values) else "not there any more"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _of_metrics(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name in one:
        first, second = one[name], other.get(name)
        if name.startswith(_TRAINED) and first != second and (first == first or second == second):
            return f"{name} is {first!r} in the first run, and {second!r} in the second"
    return None


def _refuse(text: str) -> None:
    found, _, _ = text.rpartition("; ")
    raise DataError(
        f"{found}; wanted the samples of a step as a run writes them; bring the file back from a copy"
    )
