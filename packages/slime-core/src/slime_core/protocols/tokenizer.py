"""The protocol `Tokenizer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back. No call adds special tokens by itself.

    One that knows the model's ids may have `eos_token_ids`, too; see `end_ids`. One whose chat template may print the day has `day`, a
    `datetime.date`: a run sets it to the day of its first start, and prompts are the same when it goes on. One that is of a folder may
    have its `folder`, which messages name.
    """

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`: a list, or a `Compact` column, where an engine gives such."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Render chat messages to text that ends where the assistant is to speak.

        `kwargs` are the template's variables; `add_generation_prompt=False` ends the text with the last message.
        """

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Return the ids of a rendered prompt as the model sees them: each placeholder as long as its image.

        Raises:
            DataError: an image cannot be read, there is not one placeholder for each, or the model sees none.
        """


def end_ids(tokenizer: Tokenizer, stop_token_ids: Collection[int] = ()) -> frozenset[int]:
    """Return the ids that end a turn: the tokenizer's, those of a request, and the model's.

    The model's are the attribute `eos_token_ids` of a tokenizer that knows them. Engines stop there and keep the id, which need not
    be the tokenizer's: GLM ends a turn by the role that is to speak next, Llama 3.1 a call of a tool by an id of its own.

    Args:
        tokenizer: of the model.
        stop_token_ids: of the request.
    """
    own: Collection[int] = getattr(tokenizer, "eos_token_ids", ())
    return frozenset(one for one in (tokenizer.eos_token_id, *own, *stop_token_ids) if one is not None)
