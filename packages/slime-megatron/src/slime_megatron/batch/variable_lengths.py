"""`VariableLengths`: a packed row as sequences of queries and of keys, for one call of attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.trees.segments import Segment


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
    """int64 [keys]: the row's tokens that are keys, those that segments share once for each of these; None: each once."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> VariableLengths:
        """Return those of the segments of a packed row, by rows."""
        queries = [len(segment.rows) for segment in segments]
        keys = [[each.rows for each in segment.path()][::-1] for segment in segments]
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
