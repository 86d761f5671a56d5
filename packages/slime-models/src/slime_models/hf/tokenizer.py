"""Tokenizers of Hugging Face folders. Entry point `hf` of the group `slime.tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.plugins.quick_imports import quick_imports

from slime_models.hf.config import read_json
from slime_models.hf.processor import ImageProcessor

#: Any of these holds a vocabulary that transformers can read.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class HfTokenizer:
    """A transformers tokenizer as `slime_core.protocols.Tokenizer`; adds no special tokens by itself.

    Args:
        inner: the transformers tokenizer.
        where: its folder.
    """

    def __init__(self, inner: Any, where: str) -> None:
        self.inner = inner
        self.day = date.today()
        """What chat templates print that ask for the day (`strftime_now`)."""
        self.eos_token_id: int | None = inner.eos_token_id
        self._where = where

    @property
    def folder(self) -> str:
        """The folder that it is of."""
        return self._where

    def __len__(self) -> int:
        """Return the number of ids, added tokens included."""
        return len(self.inner)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids at which engines end a response of the model: those of `generation_config.json` and of `config.json`."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            if not (path := Path(self._where, name)).is_file():
                continue
            values = read_json(path, DataError)
            for given in (values.get("eos_token_id"), (values.get("text_config") or {}).get("eos_token_id")):
                found.update(
                    one for one in (given if isinstance(given, list) else [given]) if one is not None
                )
        return frozenset(found)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. A special token that is spelled out in it becomes its id."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Return the ids of a rendered prompt as the model sees them: each placeholder as long as its image.

        Raises:
            DataError: the model sees no images, one cannot be read, or there is not one placeholder for each.
        """
        return self._processor.encode(text, images)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(Path(self._where))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`, unpolished: spaces stay as they were encoded."""
        text: str = self.inner.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Render chat messages to text that ends where the assistant is to speak.

        Args:
            messages: each with `role` and `content`.
            tools: tool schemas.
            kwargs: the template's variables; `add_generation_prompt=False` leaves the assistant out.

        Raises:
            DataError: the folder has no chat template, or the template refuses the messages.
        """
        if not self.inner.chat_template:
            raise DataError(
                f"{self._where}: has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), and --apply-chat-template wants one; add one, use an instruct "
                "model, or write the prompts as plain text"
            )
        options = {"add_generation_prompt": True, "strftime_now": self.day.strftime} | kwargs
        try:
            text: str = self.inner.apply_chat_template(
                [dict(message) for message in messages], tools=tools, tokenize=False, **options
            )
        except Exception as error:  # templates are programs that models bring along
            told = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._where}: the chat template refuses the messages ({told})") from error
        return text


def _own_code(folder: Path) -> str | None:
    """Return the class of a tokenizer that a folder brings as a program; None where it brings none."""
    path = folder / "tokenizer_config.json"
    own = read_json(path, DataError).get("auto_map") if path.is_file() else None
    found = own.get("AutoTokenizer") if isinstance(own, Mapping) else None
    found = next(filter(None, found), None) if isinstance(found, list) else found
    return None if found is None else str(found)


def load_tokenizer(model_path: Path) -> HfTokenizer:
    """Return the tokenizer of a Hugging Face folder. Never asks the network.

    Raises:
        DataError: the folder holds no tokenizer, or transformers cannot read it.
    """
    folder = Path(model_path)
    if not any((folder / file).is_file() for file in _VOCABULARIES):
        if (code := _own_code(folder)) is not None:
            raise DataError(
                f"{folder}: its tokenizer is a program of the folder ({code}), which is not run; wanted tokenizer.json, such as "
                "transformers writes of it (convert it once where you trust the program), or --tokenizer with one of your own"
            )
        raise DataError(
            f"{folder}: found no tokenizer; wanted one of {', '.join(_VOCABULARIES)} (with "
            "tokenizer_config.json); copy the tokenizer's files of the model that this one was made from"
        )
    with quick_imports():
        from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what is raised depends on the file, and on the library that reads it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{folder}: transformers cannot read the tokenizer: {type(error).__name__}: {reason}; wanted one that it has written; copy "
            "the tokenizer's files of the model that this one was made from"
        ) from error
    return HfTokenizer(inner, str(folder))
