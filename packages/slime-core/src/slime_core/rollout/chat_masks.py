"""Loss masks of conversations: which parts of the rendered text, those of the assistant, are trained on.

Group `slime.loss_masks` (`--loss-mask-type`). Every way answers with texts and the spans in them that are trained
on. The texts are cut at the spans and encoded piece by piece, so that each answer begins where generation would
have begun, on a token of its own.

The reference system (slime/utils/mask_utils.py) renders messages one at a time and joins their ids, which gives
consecutive tool results turn boundaries that the template does not have; here messages are only ever rendered
together. It also trains on the line break that templates write after an answer's end; nobody generates it, and here
it is not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import DataError
from slime_core.protocols import Tokenizer

#: Key of a message: 0 keeps an assistant's turn as context and does not train on it.
STEP_LOSS_MASK = "step_loss_mask"


@dataclass(frozen=True)
class TrainedText:
    """A rendered conversation, up to the end of the last answer that is trained on."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """(start, stop) of each answer, in characters, in order."""

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return (ids, loss mask: 1 on the ids of answers)."""
        ids: list[int] = []
        mask: list[int] = []
        position = 0
        for start, stop in self.spans:
            for piece, trained in ((self.text[position:start], 0), (self.text[start:stop], 1)):
                own = tokenizer.encode(piece)
                ids += own
                mask += [trained] * len(own)
            position = stop
        return ids, mask


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Chat messages, and what renders them."""

    messages: Sequence[Mapping[str, Any]]
    tokenizer: Tokenizer
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """The positions of the assistant's messages that are trained on.

        Raises:
            DataError: there is none, the first message is one, or a `step_loss_mask` is neither 0 nor 1.
        """
        found = []
        for i, message in enumerate(self.messages):
            wanted = message.get(STEP_LOSS_MASK, 1)
            if wanted not in (0, 1):
                raise DataError(f"message {i}: {STEP_LOSS_MASK} is {wanted!r}; wanted 0 or 1")
            if message["role"] == "assistant" and wanted:
                found.append(i)
        if not found or found[0] == 0:
            what = "begins with the assistant" if found else "has no assistant's message to train on"
            raise DataError(f"the conversation {what}; wanted a question, and an answer to it")
        return found

    @property
    def end(self) -> str:
        """The text of the token that ends an answer; empty if the tokenizer has none."""
        eos = self.tokenizer.eos_token_id
        return "" if eos is None else self.tokenizer.decode([eos], skip_special_tokens=False)

    def render(self, n_messages: int, *, generation_prompt: bool) -> str:
        """Return the first messages as text; with `generation_prompt`, up to where the assistant is to speak."""
        messages = [
            {key: value for key, value in message.items() if key != STEP_LOSS_MASK}
            for message in self.messages[:n_messages]
        ]
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, **{**self.template_kwargs, "add_generation_prompt": generation_prompt}
        )


#: A way to find what is trained on: one text, or several where no one text holds all answers as they were given.
LossMask = Callable[[Conversation], list[TrainedText]]


def rendered(conversation: Conversation) -> list[TrainedText]:
    """Take answers as the template renders them: what rendering adds to the text before the answer.

    A template may render an earlier turn otherwise once later ones follow (Qwen 3 drops its thinking). The text
    that held the answer is then closed, and the next answer begins another one: each answer is trained on as the
    template renders the newest turn, after the context that it is generated from.

    Raises:
        DataError: the template renders an answer otherwise than after its own generation prompt.
    """
    texts: list[TrainedText] = []
    for i in conversation.answers:
        before = conversation.render(i, generation_prompt=True)
        after = conversation.render(i + 1, generation_prompt=False)
        if not after.startswith(before):
            raise DataError(
                f"message {i}: the chat template does not render the answer after its own generation prompt, which "
                f"ends with {before[-40:]!r}; choose --loss-mask-type distill_qwen, which appends answers as they are"
            )
        end = conversation.end
        stop = after.rfind(end, len(before)) if end else -1
        _append(texts, before, after[: stop + len(end)] if stop >= 0 else after)
    return texts


def appended(conversation: Conversation) -> list[TrainedText]:
    """Take answers as they are: the generation prompt, the message's content, the end of the sequence.

    For templates that change what they are given, such as those of DeepSeek-R1's distillations, which drop an
    answer's thinking and open the next one's in the generation prompt; a `<think>` that both have counts once.

    Raises:
        DataError: an answer's content is not text.
    """
    texts: list[TrainedText] = []
    for i in conversation.answers:
        before = conversation.render(i, generation_prompt=True)
        content = conversation.messages[i].get("content")
        if not isinstance(content, str):
            raise DataError(f"message {i}: content is {type(content).__name__}; wanted text")
        if before.rstrip().endswith("<think>"):
            content = content.removeprefix("<think>").lstrip("\n")
        _append(texts, before, before + content.removesuffix(conversation.end) + conversation.end)
    return texts


def _append(texts: list[TrainedText], before: str, after: str) -> None:
    """Add an answer: to the last text, if that is how the answer's context begins, else as a new one."""
    spans: tuple[tuple[int, int], ...] = ()
    if texts and before.startswith(texts[-1].text):
        spans = texts.pop().spans
    texts.append(TrainedText(after, (*spans, (len(before), len(after)))))
