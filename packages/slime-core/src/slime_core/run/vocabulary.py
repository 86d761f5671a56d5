"""The vocabulary size of a model."""

from __future__ import annotations

import json
from pathlib import Path

from slime_core.protocols import Tokenizer


def vocabulary_size(model_path: Path, tokenizer: Tokenizer) -> int | None:
    """Return the number of rows of a model's embedding (`vocab_size` of its `config.json`); None if it is not given.

    A tokenizer may know fewer ids, where rows are added for speed, and says by `vocab_size` how many where there is no such
    file.
    """
    size: object = getattr(tokenizer, "vocab_size", None)
    file = model_path / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None
