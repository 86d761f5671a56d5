"""The protocol `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back. No call adds special tokens by itself."""

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
