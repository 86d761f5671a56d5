"""Boxes of mathematics, by the names that the reference system's graders have for them."""

from __future__ import annotations

from slime_rm.math.boxed import last_boxed

_COMMANDS = (r"\boxed", r"\fbox")


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last box of a text with its command, `\boxed{...}`; None without one."""
    content = last_boxed(string)
    return None if content is None else rf"\boxed{{{content}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""Return what a text that is a box holds; one that is none as it is."""
    if s is None or not s.startswith(_COMMANDS):
        return s
    return last_boxed(s)
