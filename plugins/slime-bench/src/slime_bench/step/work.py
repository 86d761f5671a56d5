"""The work of `slime bench step`, for us and for peers: prompts, and a cheap reward that differs within a group."""

from __future__ import annotations

from slime_core.samples import Sample

PROMPT = "5 + 2 = 7\n3 - 8 = -5\n4 + 9 = 13\n6 - 1 = 5\n{} + {} ="


def prompts(n: int) -> list[str]:
    """Return `n` different prompts."""
    return [PROMPT.format(i % 10, (i // 10 + i) % 10) for i in range(n)]


def parity(sample: Sample) -> float:
    """Reward the share of even letters: cheap, and different within a group."""
    return parity_of(sample.response)


def parity_of(text: str) -> float:
    """Return the share of characters with an even code point."""
    return sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text))
