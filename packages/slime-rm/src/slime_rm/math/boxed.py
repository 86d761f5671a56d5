r"""Finding the last `\boxed{...}` of a text."""

from __future__ import annotations

import re

from slime_rm.text.last_match import last_match

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s$]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed` (or `\fbox`) of `text` holds, stripped; None when there is none.

    Braces nest, and `\{` and `\}` are no braces. A box without braces holds what follows up to a blank or `$`.
    A last box that never closes, as in a truncated response, is no answer, whatever came before it.
    """
    start = last_match(_BOX, text)
    return None if start is None else _content(text, start.end())


def all_boxed(text: str) -> list[str | None]:
    r"""Return what each `\boxed` of a short text holds, as `last_boxed` does; None for one that never closes."""
    return [_content(text, start.end()) for start in _BOX.finditer(text)]


def _content(text: str, start: int) -> str | None:
    if text.startswith("{", start):
        return _braced(text, start)
    bare = _BARE.match(text, start)
    return bare[0] if bare else None


def _braced(text: str, start: int) -> str | None:
    """Return what the brace that opens at `start` holds, or None when it never closes."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip()
    return None
