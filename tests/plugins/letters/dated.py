"""A tokenizer whose chat template prints the day: a letter of the month's day before the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from slime_core.testing.tabular import LetterTokenizer


class DatedTokenizer(LetterTokenizer):
    """Prints `a` on the first day of a month."""

    day = date(2000, 1, 26)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Return the day's letter and the contents, joined."""
        return chr(96 + self.day.day) + super().apply_chat_template(messages, tools=tools, **kwargs)


def load_tokenizer(model_path: Path) -> DatedTokenizer:
    """Return the tokenizer; the folder is not looked at."""
    return DatedTokenizer()
