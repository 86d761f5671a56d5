"""The rollout `recorded`: nothing is generated; each step's samples are read from the records of an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import DataError, SampleError
from slime_core.rollout.context import RolloutRun
from slime_core.rundir.records import read_records
from slime_core.samples import Group, Sample


async def recorded(run: RolloutRun, step: int, *, samples: str) -> list[Group]:
    """Return the groups that another run trained on, scored and masked as they were.

    Args:
        run: reads nothing else.
        step: from 1.
        samples: file with `{step}` in its name, or `{rollout_id}`, which is one less: `runs/a/rollouts/step_{step:06d}.jsonl`.

    Raises:
        DataError: the file is not there, or holds no samples; names it.
    """
    return recorded_groups(path_of(samples, step))


def path_of(template: str, step: int) -> Path:
    """Return the file of a step.

    Raises:
        DataError: the template has other fields than `step` and `rollout_id`.
    """
    try:
        return Path(template.format(step=step, rollout_id=step - 1))
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"samples: found {template!r} ({type(error).__name__}: {error}); wanted a file, with {{step}} or {{rollout_id}}"
        ) from error


def recorded_groups(path: Path) -> list[Group]:
    """Return the groups of a file of records, in its order.

    Raises:
        DataError: it is not there, or damaged; names the file, and the line.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: found no file; wanted the records of a step, as rollouts/step_000001.jsonl of a run"
        )

    def tell(text: str) -> None:
        raise DataError(text)

    return grouped(read_records(path, tell=tell), where=str(path))


def grouped(rows: Iterable[Mapping[str, Any]], *, where: str) -> list[Group]:
    """Return samples, as dicts of their fields, in their groups: those in a row with one `group_index`.

    Raises:
        DataError: one is no sample, or there is none; names it.
    """
    groups: list[Group] = []
    last: object = None
    for number, row in enumerate(rows, start=1):
        try:
            sample = Sample.from_dict(row)
            sample.check()
        except (SampleError, TypeError, ValueError) as error:
            raise DataError(f"{where}, line {number}: {error}") from error
        if groups and sample.group_index is not None and sample.group_index == last:
            groups[-1].append(sample)
        else:
            groups.append([sample])
        last = sample.group_index
    if not groups:
        raise DataError(f"{where}: found no samples; wanted those of a step")
    return groups
