"""`RecordedSteps`: decoding steps, the draw of the next tokens included, that are recorded as CUDA graphs and launched whole."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_models.upload import upload
from torch import Tensor

from slime_torch.generation.sampling import Draws, SamplingMask, draw, fetched, sample
from slime_torch.model.decoder import Decoder
from slime_torch.storage.cache import Cache

log = logging.getLogger(__name__)
#: Numbers of requests for which there are steps: these, and then every multiple of the last.
_SIZES = (1, 2, 4, 8, 16)
#: Steps that are computed before one is recorded, so that libraries have made what they make at their first call.
_WARM_UPS = 2
#: Numbers of a row before its pages: a token, its position, and, as the bits of float64, a point in [0, 1) and a temperature.
_NUMBERS = 4


def can_record(model: Decoder) -> bool:
    """Return whether steps of a model can be recorded on a GPU: what its layers do has shapes that no length changes."""
    parts = (*model.kinds, *(layer.mlp for layer in model.layers))
    return all(getattr(part, "has_one_shape", False) for part in parts)


class RecordedSteps:
    """Decoding steps for some numbers of requests. A step has rows for the next such number; those beyond the requests are nobody's:
    each writes to page 0.

    A graph is launched with the memory that it was recorded with: steps are recorded anew where weights or cache have moved. So the
    cache, where it was freed, has as many pages as before at once.
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
        self._records = model.device.type == "cuda"
        # All steps write to it: each one's own would stay in memory.
        vocab = model.architecture.vocab_size
        self._logits = torch.empty(max_running, vocab, dtype=model.dtype, device=model.device)

    def next_tokens(
        self,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        draws: Draws,
        *,
        with_sampling_masks: bool = False,
    ) -> tuple[list[int], list[float], list[SamplingMask]]:
        """Append one token to each of the first slots, and return what `sample` draws after it.

        Args:
            tokens: [n], token of slot i.
            lengths: [n], tokens that slot i holds; there is room for the new one.
            draws: of the next tokens.
            with_sampling_masks: whether to return the ids that top-k and top-p kept.
        """
        size = _size(len(tokens), self._max_running)
        self._cache.reserve(self._max_running, as_before=True)
        if self._n_moves != self._cache.n_moves:
            self._forget()
            self._n_moves = self._cache.n_moves
        if size not in self._steps:
            self._steps[size] = self._made(size)
        n = len(tokens)
        logits, drawn = self._steps[size].run(tokens, lengths, draws)
        if with_sampling_masks or draws.limited_by_p.any() or draws.limited_by_k(logits.size(1)).any():
            return sample(logits[:n], draws, with_sampling_masks=with_sampling_masks)
        return *fetched(drawn[:, :n]), [None] * n

    def look_at_weights(self) -> None:
        """Forget all steps if the weights, which have changed, lie elsewhere."""
        if self._weights != (weights := self._model.weights.addresses()):
            self._forget()
            self._weights = weights

    def _made(self, size: int) -> _Step:
        step = _Step(self._model, self._cache, self._logits[:size])
        if self._records:
            try:
                self._pool = step.record(self._pool)
            except RuntimeError as error:
                self._records = False
                log.warning(
                    "decoding steps cannot be recorded as CUDA graphs, and are launched kernel by kernel: %s",
                    error,
                )
        return step

    def _forget(self) -> None:
        self._steps.clear()
        self._pool = None  # which ended with the last graph that had it


class _Step:
    def __init__(self, model: Decoder, cache: Cache, logits: Tensor) -> None:
        self._model, self._cache, self._logits = model, cache, logits
        size = len(logits)
        self._inputs = torch.zeros(size, _NUMBERS + cache.most_pages, dtype=torch.int64, device=model.device)
        self._graph: Any = None
        self._outputs: tuple[Tensor, Tensor] | None = None

    def record(self, pool: Any) -> Any:
        """Record it; returns the memory that its graph shares with others of this process, `pool` if that is given."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may train meanwhile: what it asks of the device is not for the graph.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = self._compute()
        self._graph, self._outputs = graph, outputs
        return graph.pool()

    def run(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of all rows [size, vocab_size], and what is drawn from them where nothing is restricted (`draw`)."""
        n, pages = len(tokens), self._cache.page_rows(len(tokens))
        # Pages beyond are left as they were: nobody looks for a token there, and a long context has many.
        rows = np.zeros((len(self._inputs), _NUMBERS + pages.shape[1]), np.int64)
        rows[:n, 0], rows[:n, 1] = tokens, lengths
        numbers = rows[:, 2:_NUMBERS].view(np.float64)
        numbers[:n, 0], numbers[:n, 1] = draws.points, draws.temperatures
        rows[:n, _NUMBERS:] = pages
        self._inputs[:, : rows.shape[1]].copy_(upload(rows, self._inputs.device))
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        assert self._outputs is not None
        return self._outputs

    def _compute(self) -> tuple[Tensor, Tensor]:
        tokens, lengths, *_ = self._inputs.unbind(1)
        hidden = self._model.decode(tokens, lengths, self._cache, pages=self._inputs[:, _NUMBERS:])
        logits = self._model.logits(hidden, out=self._logits)
        points, temperatures = self._inputs[:, 2:_NUMBERS].view(torch.float64).unbind(1)
        greedy = temperatures == 0
        return logits, draw(logits, greedy, points, torch.where(greedy, 1, temperatures).float())


def _size(n: int, most: int) -> int:
    """Return the rows of the step for `n` requests."""
    fitting = [size for size in _SIZES if size >= n]
    return min(fitting[0] if fitting else -(-n // _SIZES[-1]) * _SIZES[-1], most)
