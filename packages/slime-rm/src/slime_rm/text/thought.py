"""The thought of a response, and the solution behind it."""

from __future__ import annotations

import re

CUT_OFF = "the response was cut off while it thought: the thought that it opens never ends"
"""Why a response without a solution has none."""
_OPENS = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_CLOSES = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


def thought_never_ends(response: str) -> bool:
    """Return whether a response opens a thought (`<think>`) that it does not close: it was cut off while it thought.

    A closing tag without an opening one ends a thought that the prompt has opened.
    """
    opened = max((tag.end() for tag in _OPENS.finditer(response)), default=-1)
    return opened >= 0 and _CLOSES.search(response, opened) is None


def after_thought(response: str) -> str | None:
    """Return what follows the last `</think>`, all of the response where there is none; None where it still thinks.

    It still thinks where a `<think>` is never closed: what stands there is no solution. A response with the closing tag
    alone is whole, because chat templates often open the thought in the prompt.
    """
    if thought_never_ends(response):
        return None
    end = max((tag.end() for tag in _CLOSES.finditer(response)), default=0)
    return response[end:]
