"""`RecordedSteps`: decoding steps that are recorded as CUDA graphs and launched whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_models.upload import upload
from torch import Tensor

from slime_torch.model.decoder import Decoder
from slime_torch.storage.cache import Cache

#: What graphs need.
WANTED = "a GPU, bfloat16, PyTorch 2.12 or later, and layers of the usual attention alone"
#: Numbers of requests for which there are steps: these, and then every multiple of the last.
_SIZES = (1, 2, 4, 8, 16)
#: Steps that are computed before one is recorded, so that libraries have made what they make at their first call.
_WARM_UPS = 2


def can_record(model: Decoder) -> bool:
    """Return whether steps of a model can be recorded on a GPU: what its layers do has shapes that no length changes."""
    return all(getattr(kind, "has_one_shape", False) for kind in model.kinds)


class RecordedSteps:
    """Decoding steps for some numbers of requests. A step has rows for the next such number; those beyond the requests are nobody's:
    each writes to page 0.

    A graph is launched with the memory that it was recorded with: steps are recorded anew where weights or cache have moved, and the
    cache has all of its pages from the first step on.
    Source: CUDA C++ Programming Guide, "CUDA Graphs"; PyTorch, `torch.cuda.graph`.

    Args:
        model: for which `can_record`; without CUDA steps are computed and not recorded.
        cache: of the same model.
        max_running: most requests.
    """

    def __init__(self, model: Decoder, cache: Cache, *, max_running: int) -> None:
        self._model, self._cache, self._max_running = model, cache, max_running
        self._steps: dict[int, _Step] = {}
        self._n_moves = cache.n_moves
        self._weights = model.weights.addresses()
        self._pool: Any = None

    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        """Do what `Decoder.decode` does, for the first slots; the hidden states are valid until the next call."""
        size = _size(len(tokens), self._max_running)
        self._cache.reserve(self._max_running, all_pages=True)
        if self._n_moves != self._cache.n_moves:
            self._steps.clear()
            self._n_moves = self._cache.n_moves
        if size not in self._steps:
            self._steps[size] = step = _Step(self._model, self._cache, size)
            if self._model.device.type == "cuda":
                self._pool = step.record(self._pool)
        return self._steps[size].run(tokens, lengths)[: len(tokens)]

    def look_at_weights(self) -> None:
        """Forget all steps if the weights, which have changed, lie elsewhere."""
        if self._weights != (weights := self._model.weights.addresses()):
            self._steps.clear()
            self._weights = weights


class _Step:
    def __init__(self, model: Decoder, cache: Cache, size: int) -> None:
        self._model, self._cache, self._size = model, cache, size
        self._inputs = torch.zeros(size, 2 + cache.most_pages, dtype=torch.int64, device=model.device)
        self._graph: Any = None
        self._hidden: Tensor | None = None

    def record(self, pool: Any) -> Any:
        """Record it; returns the memory that its graph shares with others of this process, `pool` if that is given."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._hidden = self._compute()
        return self._graph.pool()

    def run(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        """Return the hidden states of all rows."""
        rows, pages = np.zeros(self._inputs.shape, np.int64), self._cache.page_rows(len(tokens))
        rows[: len(tokens), 0], rows[: len(tokens), 1] = tokens, lengths
        rows[: len(tokens), 2 : 2 + pages.shape[1]] = pages
        self._inputs.copy_(upload(rows, self._inputs.device))
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        assert self._hidden is not None
        return self._hidden

    def _compute(self) -> Tensor:
        inputs = self._inputs
        return self._model.decode(inputs[:, 0], inputs[:, 1], self._cache, pages=inputs[:, 2:])


def _size(n: int, most: int) -> int:
    """Return the rows of the step for `n` requests."""
    fitting = [size for size in _SIZES if size >= n]
    return min(fitting[0] if fitting else -(-n // _SIZES[-1]) * _SIZES[-1], most)
