"""Whether the thought of a response ends."""

from __future__ import annotations

import re

_OPENS = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_CLOSES = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


def thought_never_ends(response: str) -> bool:
    """Return whether a response opens a thought (`<think>`) that it does not close: it was cut off while it thought.

    A closing tag without an opening one ends a thought that the prompt has opened.
    """
    opened = max((tag.end() for tag in _OPENS.finditer(response)), default=-1)
    return opened >= 0 and _CLOSES.search(response, opened) is None
