"""`MultiTurnLossMaskGenerator`: ids and loss mask of a conversation, by the loss masks of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slime_core.plugins.registry import Registry
from slime_core.rollout.chat_masks import Conversation

from slime_compat.engine.tokenizer import KnownTokenizer


class MultiTurnLossMaskGenerator:
    """Finds what of a conversation is trained on.

    Args:
        tokenizer: of transformers.
        tokenizer_type: `qwen`, `qwen3`, `distill_qwen`, ...: here one way serves every chat template.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type
        self._mask = Registry().resolve("slime.loss_masks", "template")

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return (ids, 1 on those of the assistant's answers), up to the end of the last answer."""
        tokenizer = KnownTokenizer(self.tokenizer)
        texts = self._mask(Conversation(messages=messages, tokenizer=tokenizer, tools=tools))
        ids, mask = texts[-1].encode(tokenizer)
        return ids, mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return how many tokens each mask has from its first 1 on."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in map(list, loss_masks)]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the text of each run of ids that is trained on."""
        pairs = groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in run]) for trained, run in pairs if trained]
