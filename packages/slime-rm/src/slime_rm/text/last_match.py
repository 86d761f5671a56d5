"""The last place in a text where a pattern matches."""

from __future__ import annotations

import re


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last of the matches that `pattern.finditer` finds; None where there is none."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    return found
