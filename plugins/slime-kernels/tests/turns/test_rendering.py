"""What stands between an answer and the next one: a turn has one end, whichever id ended it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from slime_kernels.turns.rendering import reply

SPECIAL = {"<|im_end|>": 256, "<|endoftext|>": 257, "<|user|>": 258, "<|assistant|>": 259, "<|eot|>": 260}
_SPELT = {number: text for text, number in SPECIAL.items()}


class Chat:
    """A token a byte, and special ones. Templates: `qwen` ends every turn, `glm` ends it by the role that speaks next."""

    def __init__(self, template: str, *, eos: str, model: tuple[str, ...] = ()) -> None:
        self.template, self.eos_token_id = template, SPECIAL[eos]
        self.eos_token_ids = frozenset(SPECIAL[one] for one in model)

    def encode(self, text: str) -> list[int]:
        parts = re.split(r"(<\|\w+\|>)", text)
        return [one for part in parts for one in ([SPECIAL[part]] if part in SPECIAL else part.encode())]

    def decode(self, tokens: Any, *, skip_special_tokens: bool = True) -> str:
        spelt = (
            (_SPELT[one] if one > 255 else chr(one)) for one in tokens if one < 256 or not skip_special_tokens
        )
        return "".join(spelt)

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, **_: Any) -> str:
        if self.template == "qwen":
            told = "".join(f"{one['role']}:{one['content']}<|im_end|>\n" for one in messages)
            return told + "assistant:" * add_generation_prompt
        told = "".join(f"<|{one['role']}|>{one['content']}" for one in messages)
        return told + "<|assistant|>" * add_generation_prompt


QWEN = {"template": "qwen", "eos": "<|im_end|>", "model": ("<|im_end|>", "<|endoftext|>")}
BASE = {"template": "qwen", "eos": "<|endoftext|>"}
GLM = {"template": "glm", "eos": "<|endoftext|>", "model": ("<|endoftext|>", "<|user|>")}
AFTER, NEXT = "user:Faster.<|im_end|>\nassistant:", "<|user|>Faster.<|assistant|>"


@pytest.mark.parametrize(
    ("chat", "answer", "between"),
    [
        (QWEN, "x<|im_end|>", f"\n{AFTER}"),
        (QWEN, "x<|endoftext|>", f"\n{AFTER}"),
        (QWEN, "x", f"<|im_end|>\n{AFTER}"),  # a limit cut it off
        (BASE, "x<|endoftext|>", f"\n{AFTER}"),  # the template's end is none of the model's
        (BASE, "x<|im_end|>", f"\n{AFTER}"),  # a request stopped at it
        (BASE, "x<|eot|>", f"<|im_end|>\n{AFTER}"),  # which ends nothing
        (GLM, "x<|user|>", NEXT.removeprefix("<|user|>")),
        (GLM, "x<|endoftext|>", NEXT),  # the template has no end of its own
        (GLM, "x", NEXT),
    ],
)
def test_a_turn_has_one_end(chat, answer, between):
    tokenizer = Chat(**chat)
    made = {"text": "Do it.", "chat": True, "template_kwargs": {}}
    assert reply(tokenizer, made, "Faster.", tokenizer.encode(f"Do it.{answer}")) == between


def test_prompts_without_a_chat_have_no_ends():
    made = {"text": "Do it.", "chat": False, "template_kwargs": {}}
    assert reply(Chat(**QWEN), made, "Faster.", [120, 256]) == "\n\nFaster.\n"
