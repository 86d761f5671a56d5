"""The run's tokenizer as functions there use it: that of transformers, or the same calls on any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.protocols import Tokenizer


class PlainTokenizer:
    """The calls of a transformers tokenizer that rollout code makes, on any tokenizer of ours; adds no special tokens.

    Args:
        inner: of the run.
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.eos_token_id = self.pad_token_id = inner.eos_token_id
        self.bos_token_id = None

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._inner)  # type: ignore[arg-type]  # every tokenizer of a run says it

    def __call__(self, text: str | Sequence[str], **_: Any) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of a text, or of several."""
        ids = self.encode(text) if isinstance(text, str) else [self.encode(one) for one in text]
        mask = [1] * len(ids) if isinstance(text, str) else [[1] * len(one) for one in ids]  # type: ignore[arg-type]  # lists
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the ids of a text."""
        return self._inner.encode(text)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Return the texts of several lists of ids."""
        return [self.decode(ids, **options) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """Render chat messages; returns ids, or text without `tokenize`."""
        rest = {
            name: value for name, value in options.items() if name not in ("return_dict", "return_tensors")
        }
        text = self._inner.apply_chat_template(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, **rest
        )
        return self.encode(text) if tokenize else text


def foreign_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the transformers tokenizer within one of ours, or what behaves as one."""
    return getattr(tokenizer, "inner", None) or PlainTokenizer(tokenizer)


class KnownTokenizer:
    """A transformers tokenizer, or what behaves as one, as a tokenizer of ours.

    Args:
        inner: as a user has it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.eos_token_id: int | None = getattr(inner, "eos_token_id", None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return list(self._inner.encode(text, add_special_tokens=False))

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Return the ids of a text; no images are taken."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Render chat messages to text that ends where the assistant is to speak."""
        options = {"add_generation_prompt": True} | kwargs
        return str(self._inner.apply_chat_template(list(messages), tools=tools, tokenize=False, **options))
