"""Removing the special tokens of chat templates from the end of a response."""

from __future__ import annotations

import re

_NAMES = (
    "s|eos|bos|pad|unk|eod|eot|end|sep|stop|turn|end_of_turn|start_of_turn|end_of_text|end_of_sentence|endoftext"
    "|im_end|im_start|eos_token|bos_token|pad_token"
)
_SPECIAL = re.compile(
    rf"(?:<[|｜][^<>|｜\s]{{1,40}}[|｜]>|</?(?:{_NAMES})>|<(?:{_NAMES})\|>|\[(?:PAD|EOS|SEP|UNK|/INST)\])\Z",
    re.IGNORECASE,
)
_LONGEST = 50


def without_special_tokens(response: str) -> str:
    """Return `response` without the special tokens and blanks at its end; those elsewhere stay.

    They are what stands between `<|` and `|>` (DeepSeek writes the wide bars U+FF5C), and the names that other
    tokenizers give to ends, turns and padding: `</s>`, `<eos>`, `<end_of_turn>`, `[PAD]`. Without
    `--rollout-skip-special-tokens` every finished response ends in one.
    """
    end = len(response.rstrip())
    struck = re.search("<s>", response, re.IGNORECASE)
    while (found := _SPECIAL.search(response, max(0, end - _LONGEST), end)) is not None:
        if found[0].lower() == "</s>" and struck is not None and struck.end() <= end:
            break  # HTML: what it closes is struck out
        end = found.start()
        while end and response[end - 1].isspace():
            end -= 1
    return response[:end]


def up_to_special_tokens(response: str) -> str:
    """Return `response` up to the special tokens at its end and the blanks before them; as it is where there are none.

    For rewards to which blanks at the end of a response matter, or that hand the response to somebody else.
    """
    text = without_special_tokens(response)
    return response if text == response.rstrip() else text
