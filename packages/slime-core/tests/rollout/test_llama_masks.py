"""Loss masks of Llama 3's chat template, which KernelLLM has, too: token by token, by hand."""

from __future__ import annotations

import re

import pytest
from slime_core.plugins.registry import Registry
from slime_core.rollout.chat_masks import STEP_LOSS_MASK
from slime_core.rollout.rollouts.sft import supervised
from slime_core.samples import Sample

BEGIN, START, END, EOT, EOS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end_of_text|>",
)
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
MASKS = ("llama", "llama3", "kernelllm")


class Llama:
    """A tokenizer with the template of Llama 3.1; its tokens are special ones, words, line breaks and single characters."""

    def __init__(self, eos: str) -> None:
        self.words: list[str] = [BEGIN, START, END, EOT, EOS]
        self.eos_token_id = self.words.index(eos)

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"<\|\w+\|>|\w+|\n\n|\s|.", text)
        self.words += [piece for piece in dict.fromkeys(pieces) if piece not in self.words]
        return [self.words.index(piece) for piece in pieces]

    def decode(self, ids, *, skip_special_tokens: bool = True) -> str:
        words = [self.words[int(one)] for one in ids]
        return "".join(one for one in words if not (skip_special_tokens and one.startswith("<|")))

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt=True) -> str:
        given = messages[0]["content"] if messages[0]["role"] == "system" else ""
        turns = messages[1:] if given else messages
        text = f"{BEGIN}{START}system{END}\n\n{DATES}{given}{EOT}"
        for one in turns:
            text += f"{START}{one['role']}{END}\n\n{one['content'].strip()}{EOT}"
        return text + (f"{START}assistant{END}\n\n" if add_generation_prompt else "")


def masked(name, messages, eos=EOT):
    """Return the tokens of a conversation, those that are trained on in brackets."""
    tokenizer = Llama(eos)
    loss_mask = Registry().resolve("slime.loss_masks", name)
    (sample,) = supervised(Sample(index=0, prompt=messages), tokenizer, loss_mask=loss_mask)
    mask = [0] * sample.prompt_length + list(sample.loss_mask)
    return [
        f"[{word}]" if trained else word
        for word, trained in zip((tokenizer.words[int(one)] for one in sample.tokens), mask, strict=True)
    ]


def header(role):
    return [START, role, END, "\n\n"]


def turns(*contents):
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content, **keys}
        for number, (content, keys) in enumerate(contents)
    ]


#: The tokens before the first turn: the template's own system message.
SYSTEM = [
    BEGIN, *header("system"), "Cutting", " ", "Knowledge", " ", "Date", ":", " ", "December", " ", "2023", "\n",
    "Today", " ", "Date", ":", " ", "26", " ", "Jul", " ", "2024", "\n\n", EOT,
]  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("eos", [EOT, EOS])  # of the tuned models, and of the base model's tokenizer
def test_answers_and_their_end_are_trained_on_and_no_header(name, eos):
    messages = turns(("Write relu", {}), ("Sure thing", {}), ("Faster", {}), ("Done", {}))
    assert masked(name, messages, eos) == [
        *SYSTEM,
        *header("user"), "Write", " ", "relu", EOT,
        *header("assistant"), "[Sure]", "[ ]", "[thing]", f"[{EOT}]",
        *header("user"), "Faster", EOT,
        *header("assistant"), "[Done]", f"[{EOT}]",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_an_answer_may_be_context(name):
    messages = turns(("Write relu", {}), ("No", {STEP_LOSS_MASK: 0}), ("Please", {}), ("Yes", {}))
    found = masked(name, messages)
    assert [one for one in found if one.startswith("[")] == ["[Yes]", f"[{EOT}]"]
    assert found.index("No") < found.index("Please") < found.index("[Yes]")


@pytest.mark.parametrize("name", MASKS)
def test_a_system_message_is_not_trained_on(name):
    system = {"role": "system", "content": "Write Triton"}
    found = masked(name, [system, *turns(("relu", {}), ("x", {}))])
    assert [one for one in found if one.startswith("[")] == ["[x]", f"[{EOT}]"]
    assert "Triton" in found
