"""Samples of a step as rows of a table, which each tracker shows as its program does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from slime_core.config.settings import Settings
from slime_core.samples import Group, Sample

#: Columns of a row.
COLUMNS = ("step", "group", "sample", "prompt", "response", "label", "reward", "status")
Row = tuple[int, int | None, int | None, str, str, str, float | None, str]


class SampleTable:
    """Holds rows of a step's samples until its metrics are known."""

    def __init__(self, n_samples: int, reward_key: str | None) -> None:
        self._n_samples, self._reward_key = n_samples, reward_key
        self._rows: dict[int, list[Row]] = {}

    @classmethod
    def of(cls, settings: Settings) -> SampleTable:
        """Return the table that settings ask for."""
        return cls(settings.run.log_samples, settings.reward.reward_key)

    def take(self, step: int, groups: Sequence[Group]) -> None:
        """Keep rows of a step: the first sample of each group, then the second of each, up to the number that is wanted."""
        turns = itertools.zip_longest(*groups)
        samples = [sample for turn in turns for sample in turn if sample is not None]
        rows = [row(step, sample, self._reward_key) for sample in samples[: self._n_samples]]
        if rows:
            self._rows[step] = rows

    def give(self, step: int) -> list[Row]:
        """Return the rows of a step, once; none where none were taken."""
        return self._rows.pop(step, [])


def row(step: int, sample: Sample, reward_key: str | None) -> Row:
    """Return a sample's row, in the order of `COLUMNS`; chat messages are JSON, and a sample without a reward has None."""
    prompt = (
        sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, ensure_ascii=False)
    )
    reward = None if sample.reward is None else sample.reward_value(reward_key)
    return (
        step, sample.group_index, sample.index, prompt, sample.response, sample.label or "", reward, str(sample.status),
    )  # fmt: skip


def as_markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table of Markdown: a line a row, what would break one escaped."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", "<br>")
