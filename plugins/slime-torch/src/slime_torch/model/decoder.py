"""The decoder: layers in a row, written for decoding many sequences by one token each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch
from slime_core.errors import EngineError
from slime_models.family.architecture import Architecture
from slime_models.family.family import OUTPUT_WEIGHT, ModelFamily
from slime_models.upload import upload
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.batch import Batch, PromptRun, Prompts
from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Kind, Routes
from slime_torch.model.family_decoder import decoder_of
from slime_torch.storage.cache import PAGE_LEN, Cache
from slime_torch.storage.weights import Weights


class Decoder:
    """Token ids to hidden states and logits, with a cache that the caller owns.

    Args:
        family: of the model; it may bring its layers.
        architecture: what it read of the model.
        max_length: most positions.
        dtype: storage and compute dtype.
        device: where the weights live.
        with_kernels: compute what lies between the products by compiled kernels, where they can be compiled and run.

    Raises:
        EngineError: the model has a tensor that its layers have no use for, or lacks one.
        PluginError: the family brings no layers for this engine, though it has some of its own.
    """

    def __init__(
        self,
        family: ModelFamily,
        architecture: Architecture,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        with_kernels: bool = True,
    ) -> None:
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self.max_length = max_length
        shapes, described = family.hf_shapes(architecture), decoder_of(family, architecture)
        builder = Builder(
            architecture,
            shapes=shapes,
            float32=family.float32(architecture),
            prefix=family.prefix,
            max_length=max_length,
            dtype=dtype,
            device=device,
            with_kernels=with_kernels,
        )
        self.has_kernels = builder.has_kernels or builder.has_gpu_kernels
        self.embedding = builder.tensor(family.embedding)
        self._scale: float | None = None
        if described.embedding_scale is not None:
            self._scale = torch.tensor(described.embedding_scale(architecture), dtype=dtype).item()
        self.layers = tuple(described.layers(builder))
        self.norm = described.norm(builder, f"{family.prefix}norm.weight")
        self.matrices = tuple(builder.matrices)
        """Those of the layers that every token is multiplied by."""
        self.head = self.embedding
        if not architecture.tie_word_embeddings:
            self.head = builder.matrix(OUTPUT_WEIGHT)
        elif builder.packs:  # a packed copy is multiplied faster
            self.head = builder.matrix(family.embedding)
        self.weights = Weights(builder.made)
        self._check(shapes)
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys(layer.attention.kind for layer in self.layers))
        self._in_order = [(layer, self.kinds.index(layer.attention.kind)) for layer in self.layers]

    def _check(self, names: Collection[str]) -> None:
        unused = sorted(set(names) - self.weights.shapes().keys())
        if unused:
            raise EngineError(
                f"{self.architecture.model_type}: the model has {unused[0]} and {len(unused) - 1} more tensors that the "
                "torch engine's layers have no use for: choose another --rollout-engine, or name a decoder in the model family"
            )

    def create_cache(
        self,
        max_slots: int,
        *,
        max_len: int | None = None,
        max_bytes: int | None = None,
        max_tokens: int | None = None,
        page_len: int = PAGE_LEN,
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """Return an empty cache (see `Cache`), of the dtype that decoding reads, or another.

        `max_len` is the model's when not given.
        """
        return Cache(
            [kind.create_store(page_len=page_len, dtype=dtype) for kind in self.kinds],
            page_len=page_len,
            max_slots=max_slots,
            max_len=self.max_length if max_len is None else max_len,
            device=self.device,
            max_bytes=max_bytes,
            max_tokens=max_tokens,
        )

    def decode(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache,
        *,
        pages: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Append one token to each of the first slots of the cache.

        Args:
            tokens: int64 [n], token of slot i.
            lengths: int64 [n], tokens that slot i holds, and so the new token's position.
            cache: its first n slots have room for the new token.
            pages: of these slots, or with more columns, where they were asked for already (`Cache.pages`).
            routes: each layer with experts appends those of the tokens.

        Returns:
            Normalised hidden states [n, hidden_size].
        """
        slots = torch.arange(len(tokens), device=self.device)
        pages = cache.pages(len(tokens)) if pages is None else pages
        batch = Batch(lengths, slots, pages, cache.page_len)
        return self._forward(tokens, batch, cache, routes=routes)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        cache: Cache,
        *,
        routes: Routes | None = None,
    ) -> Tensor:
        """Run whole prompts and store what later tokens need of them, prompt i in slot `slots[i]`, which has room for it.

        Prompts of one length that follow one another share an attention kernel: best sorted by length. Each layer with experts
        appends those of all tokens to `routes`.

        Returns:
            Normalised hidden states of each prompt's last token [prompts, hidden_size].
        """
        lengths = upload(np.array([len(prompt) for prompt in prompts]), self.device)
        tokens = upload(np.array([token for prompt in prompts for token in prompt]), self.device)
        where = upload(np.array(slots), self.device)
        ends = lengths.cumsum(0)
        n = len(tokens)  # told, so that a GPU need not be asked
        starts = (ends - lengths).repeat_interleave(lengths, output_size=n)
        positions = torch.arange(n, device=self.device) - starts
        runs, token, prompt = [], 0, 0
        for length, alike in itertools.groupby(prompts, len):
            count = len(list(alike))
            span = slice(token, token + count * length)
            runs.append(PromptRun(span, count, length, where[prompt : prompt + count]))
            token, prompt = span.stop, prompt + count
        batch = Batch(
            positions,
            where.repeat_interleave(lengths, output_size=n),
            cache.pages(max(slots) + 1),
            cache.page_len,
            Prompts(tuple(runs), F.pad(ends, (1, 0)).to(torch.int32), max(map(len, prompts))),
        )
        return self._forward(tokens, batch, cache, rows=ends - 1, routes=routes)

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab_size], in the model's dtype; written to `out` where that is given, not with packed weights."""
        if out is not None:
            return torch.mm(hidden, self.head.tensor.t(), out=out)
        return self.head.linear(hidden)

    def _forward(
        self,
        tokens: Tensor,
        batch: Batch,
        cache: Cache,
        *,
        rows: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        x = self.embedding.tensor[tokens]
        if self._scale is not None:
            x *= self._scale
        passes = [kind.begin(batch, store) for kind, store in zip(self.kinds, cache.stores, strict=True)]
        for layer, kind in self._in_order:
            mixed = layer.mix(x, passes[kind])
            if rows is not None and routes is None and layer is self.layers[-1]:
                x, mixed, rows = x[rows], mixed[rows], None  # nobody asks for the others any more
            x = layer.finish(mixed, x, routes)
        return self.norm(x if rows is None else x[rows])
