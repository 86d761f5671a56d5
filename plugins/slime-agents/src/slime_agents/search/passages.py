"""`Passage`, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found."""

    title: str
    """May be empty."""
    text: str

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Passage:
        """Return the passage of a row: `text` and perhaps `title`, or `contents`, whose first line is the title in quotes.

        The second form is that of Search-R1's corpora and servers.

        Raises:
            DataError: the row has neither; says where.
        """
        if isinstance(contents := row.get("contents"), str):
            first, line_break, rest = contents.partition("\n")
            return cls(first.strip().strip('"'), rest.strip()) if line_break else cls("", first.strip())
        title, text = row.get("title") or "", row.get("text")
        if not isinstance(text, str) or not isinstance(title, str):
            raise DataError(f"{where}: has {sorted(row)}; wanted text (and title), or contents, as text")
        return cls(title.strip(), text.strip())

    def shown(self, number: int, most: int) -> str:
        """Return what the policy reads: one paragraph, of at most so many characters of text."""
        text = self.text if len(self.text) <= most else self.text[:most].rstrip() + "..."
        title = f"(Title: {self.title}) " if self.title else ""
        return f"Doc {number}{title and ' '}{title.rstrip()}: {' '.join(text.split())}"


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a JSON-lines file.

    Raises:
        DataError: it cannot be read, or a line of it; names the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Passage.of(_row(line, f"{path}:{number}"), f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); wanted a JSON-lines file of passages") from error


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: is a JSON {type(row).__name__}; wanted an object")
    return row
