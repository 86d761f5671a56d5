"""`VariableLengths`: a packed row as sequences of queries and of keys, for one call of attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.prompt_groups import PromptGroup


@dataclass(frozen=True)
class VariableLengths:
    """Which tokens of a packed row attend to which, sequence after sequence; causal, the last query being at the last key."""

    query_ends: Tensor
    """int32 [n + 1]: where the queries of each sequence begin in the row, and where those of the last one end."""
    key_ends: Tensor
    """int32 [n + 1]: the same of keys, in the row or, where there are any, among `key_tokens`."""
    longest_query: int
    """Queries of the longest sequence."""
    longest_key: int
    """Keys of the sequence that has most."""
    key_tokens: Tensor | None
    """int64 [keys]: the row's tokens that are keys, those of a shared prompt once for each of its samples; None: each once."""

    @classmethod
    def of(cls, groups: Sequence[PromptGroup], device: torch.device) -> VariableLengths:
        """Return those of prompt groups that follow one another; see `pack`."""
        queries: list[int] = []
        keys: list[list[range]] = []
        start = 0
        for group in groups:
            prefix = range(start, start := start + group.prefix)
            suffixes = [range(start, start := start + n) for n in group.suffixes]
            suffixes = [suffix for suffix in suffixes if suffix]
            if len(suffixes) == 1:  # one sequence: its prompt is shared with no other
                prefix, suffixes = range(prefix.start, suffixes[0].stop), []
            queries += [len(prefix), *map(len, suffixes)]
            keys += [[prefix], *([prefix, suffix] for suffix in suffixes)]
        lengths = [sum(map(len, ranges)) for ranges in keys]
        is_shared = sum(lengths) > sum(queries)
        tokens = np.concatenate([np.arange(r.start, r.stop) for ranges in keys for r in ranges])
        query_ends = _ends(queries, device)
        return cls(
            query_ends=query_ends,
            key_ends=_ends(lengths, device) if is_shared else query_ends,
            longest_query=max(queries),
            longest_key=max(lengths),
            key_tokens=upload(tokens, device) if is_shared else None,
        )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return upload(np.cumsum([0, *lengths], dtype=np.int32), device)
