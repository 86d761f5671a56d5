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
        before: ids up to the end of the answer. An id at its end that ends answers takes the place of the template's end.
    """
    if not made["chat"]:
        return f"\n\n{text}\n"
    after = _after_answer(tokenizer, made, [{"role": "user", "content": text}])
    last = int(before[-1])
    own = tokenizer.encode(_after_answer(tokenizer, made, [], add_generation_prompt=False))[:1]
    ends = end_ids(tokenizer)
    is_end = bool(own) and (own[0] in ends or not tokenizer.decode(own))
    if is_end and (last in ends or last == own[0]):
        return after.removeprefix(tokenizer.decode(own, skip_special_tokens=False))
    # Without an end of its own a template may end a turn by the role that speaks next, as GLM's.
    sampled = tokenizer.decode([last], skip_special_tokens=False) if last in ends else ""
    return after.removeprefix(sampled)


def _after_answer(
    tokenizer: Tokenizer, made: Mapping[str, Any], new: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """Return what the chat template writes after an answer that `new` messages follow."""
    messages = [
        {"role": "user", "content": made["text"]},
        {"role": "assistant", "content": _MARK},
        *new,
    ]
    rendered = tokenizer.apply_chat_template(messages, **{**made["template_kwargs"], **variables})
    return rendered[rendered.rindex(_MARK) + len(_MARK) :]
