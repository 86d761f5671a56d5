"""Finding the fenced block of code in a response that is its program."""

from __future__ import annotations

import re
import textwrap

from slime_core.rewards.ending import without_special_tokens

_FENCE = re.compile(r"`{3,}+|~{3,}+")
_QUOTES = re.compile(r"^(?:[ \t]*> ?)+")
_END_OF_THOUGHT = re.compile(r"</(?:think|thinking|thought|reasoning)>(?![\"'\\])", re.IGNORECASE)
_THOUGHT = re.compile(r"(?<![\"'`])<(?:think|thinking|thought|reasoning)>(?![\"'\\]|`(?!``))", re.IGNORECASE)
_PYTHON = frozenset({"python", "python3", "py", "py3", "ipython", "ipython3"})


def python_block(response: str) -> str | None:
    """Return the program of a response: its last block with the tag of Python, or without any such its last untagged one.

    A fence is three or more backticks or tildes, indented or not, and closes with as many of the same; one that never
    closes holds all that follows. A tag of Python may follow text on its line. Blocks of other languages are none. The
    indentation that all lines share goes, as do the marks of a quotation (`>`) that holds the block; line ends are
    newlines. What stands before `</think>` is thought and holds no program, nor does a thought that never ends.
    """
    tagged = untagged = None
    for tag, source in _blocks(without_special_tokens(response)):
        language = _language(tag)
        if language in _PYTHON:
            tagged = source
        elif not language:
            untagged = source
    return untagged if tagged is None else tagged


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return tag and content of each block of the solution; in a block of it, `</think>` is part of the program."""
    blocks: list[tuple[str, list[str]]] = []
    fence, quotes = "", 0
    thinks = ended = False
    for marked in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not (fence and ended) and (parts := _END_OF_THOUGHT.split(marked))[1:]:
            blocks, fence, marked = [], "", parts[-1]
            thinks, ended = False, True
        if not fence:
            thinks = thinks or _THOUGHT.search(marked) is not None
            line = _QUOTES.sub("", marked)
            quotes = marked.count(">", 0, len(marked) - len(line))
            opening = _FENCE.search(line)
            if opening is None:
                continue
            tag = line[opening.end() :].strip()
            if "`" not in tag and (not line[: opening.start()].strip() or _language(tag) in _PYTHON):
                fence = opening[0]
                blocks.append((tag, []))
            continue
        line = re.sub(rf"^(?:[ \t]*> ?){{0,{quotes}}}", "", marked) if quotes else marked
        code = line.rstrip().rstrip(fence[0])
        if len(line.rstrip()) - len(code) >= len(fence) and (not code.strip() or _ends_code(code)):
            fence = ""
            line = code
        blocks[-1][1].append(line)
    return [] if thinks else [(tag, textwrap.dedent("\n".join(lines))) for tag, lines in blocks]


def _language(tag: str) -> str:
    return re.split(r"[\s:,={}]", tag.strip("{. ").lower(), maxsplit=1)[0]


def _ends_code(line: str) -> bool:
    """Return whether a line before a fence is code by itself, and the fence no part of a text in it."""
    return line.count('"') % 2 == 0 and line.count("'") % 2 == 0 and "#" not in line
