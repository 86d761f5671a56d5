"""`Dataset`: the prompts of a data file, with the arguments that it has there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.open_rows import read_rows

from slime_compat.engine.tokenizer import KnownTokenizer
from slime_compat.views.samples.sample import ReferenceSample as Sample
from slime_compat.views.samples.sample import viewed


def read_file(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a JSONL or Parquet file; `path@[start:stop]` takes a slice."""
    for record in read_rows(path):
        yield record.values


class Dataset:
    """Samples of a data file, one a row.

    Args:
        path: file.
        tokenizer: of transformers.
        processor: not used: images are read when they are sent.
        max_length: most tokens of a prompt; longer ones are left out.
        prompt_key: column of the prompt; the others likewise.
        seed: of `shuffle`.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        prompt_format = PromptFormat(
            input_key=prompt_key,
            label_key=label_key,
            metadata_key=metadata_key,
            tool_key=tool_key or "tools",
            multimodal_keys=multimodal_keys or {},
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
        )
        built, _ = build_prompts(read_rows(path), KnownTokenizer(tokenizer), prompt_format=prompt_format)
        self.origin_samples: list[Sample] = []
        for sample in built:
            if max_length is None or len(sample.tokens) <= max_length:
                sample.tokens = []
                self.origin_samples.append(viewed(sample))
        self.samples, self.seed = self.origin_samples, seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Order the samples anew for an epoch; the order depends on the seed and the epoch alone."""
        if self.epoch_id == new_epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples, self.epoch_id = [self.origin_samples[place] for place in order], new_epoch_id

    def __getitem__(self, place: int) -> Sample:
        """Return a sample."""
        return self.samples[place]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)
