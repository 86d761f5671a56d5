"""Counters of a sample's requests: the dicts of ours, whose entries are attributes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Counter of speculative decoding -> where an engine's answer has it.
_SPECULATION = {
    "spec_accept_token_num": "spec_accept_token_num",
    "spec_draft_token_num": "spec_draft_token_num",
    "spec_verify_ct": "spec_verify_ct",
    "completion_token_num": "completion_tokens",
}


class SpecInfo(dict[str, int]):
    """Counters of speculative decoding; absent ones are 0."""

    def __getattr__(self, name: str) -> int:
        """Return a counter."""
        if name not in _SPECULATION:
            raise AttributeError(name)
        return self.get(name, 0)

    @property
    def spec_accept_rate(self) -> float:
        """Share of the proposed tokens that were right, 0 without any."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens of a verification pass, 0 without any."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any], *_: Any) -> None:
        """Count what an answer of the engine says."""
        for name, theirs in _SPECULATION.items():
            self[name] = self.get(name, 0) + int(meta_info.get(theirs, 0) or 0)


class PrefixCacheInfo(dict[str, int]):
    """Counters of the engine's prefix cache; absent ones are 0."""

    def __getattr__(self, name: str) -> int:
        """Return a counter."""
        if name not in ("cached_tokens", "total_prompt_tokens"):
            raise AttributeError(name)
        return self.get(name, 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that were cached, 0 without any."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count what an answer of the engine says."""
        self["cached_tokens"] = self.cached_tokens + int(meta_info.get("cached_tokens", 0))
        self["total_prompt_tokens"] = self.total_prompt_tokens + int(meta_info.get("prompt_tokens", 0))
