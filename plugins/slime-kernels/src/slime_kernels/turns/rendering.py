"""Prompts of later turns, as text that is encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.protocols import Tokenizer, end_ids

_MARK = "the answer goes here"


def opening(tokenizer: Tokenizer, made: Mapping[str, Any], text: str) -> list[int]:
    """Return the ids of a prompt that says `text`."""
    if made["chat"]:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, **made["template_kwargs"])
    return tokenizer.encode(text)


def reply(tokenizer: Tokenizer, made: Mapping[str, Any], text: str, before: Sequence[int]) -> str:
    """Return what follows an answer in a chat where `text` is said next, up to where the next answer begins.

    Args:
        tokenizer: with the chat template.
        made: how the first prompt was made.
        text: what is said.
        before: ids up to the end of the answer: where its last one ends answers, that is not said twice.
    """
    last = [int(one) for one in before[-1:] if one in end_ids(tokenizer)]
    end = tokenizer.decode(last, skip_special_tokens=False)
    if not made["chat"]:
        return f"\n\n{text}\n"
    messages = [
        {"role": "user", "content": made["text"]},
        {"role": "assistant", "content": _MARK},
        {"role": "user", "content": text},
    ]
    rendered = tokenizer.apply_chat_template(messages, **made["template_kwargs"])
    tail = rendered[rendered.rindex(_MARK) + len(_MARK) :]
    return tail.removeprefix(end)
