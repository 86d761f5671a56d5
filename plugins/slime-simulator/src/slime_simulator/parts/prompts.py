"""Simulated prompts: ids that are numbers of tokens, and their tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.samples import Group, Sample

from slime_simulator.costs.traces import Trace


class SimulatedPrompts:
    """A `DataSource` without end. Its groups are one sample each, which stands for all samples of the prompt.

    The prompt is one id: how many tokens the prompt has.

    Args:
        trace: lengths.
        samples: samples of a prompt.
    """

    def __init__(self, trace: Trace, *, samples: int) -> None:
        self._trace, self._samples, self._taken = trace, samples, 0

    def __len__(self) -> int:
        """Return 0: there is no end."""
        return 0

    def take(self, n_groups: int) -> list[Group]:
        """Return the next prompts."""
        first, self._taken = self._taken, self._taken + n_groups
        return [
            [
                Sample(
                    index=group, group_index=group, tokens=[self._trace.prompt_tokens(group * self._samples)]
                )
            ]
            for group in range(first, self._taken)
        ]

    def state(self) -> dict[str, Any]:
        """Return how many prompts were taken."""
        return {"taken": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        self._taken = int(state["taken"])


class NumberTokenizer:
    """A `Tokenizer` whose ids are numbers of tokens, which spell nothing."""

    eos_token_id: int | None = None
    vocab_size = 2**31

    def __len__(self) -> int:
        """Return the number of ids."""
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Refuse: simulated prompts are ids."""
        raise DataError(f"a simulation found the text {text[:20]!r} to encode; wanted prompts that are ids")

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Refuse."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return no text."""
        return ""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Refuse."""
        raise DataError("a simulation found messages; wanted prompts that are ids")
