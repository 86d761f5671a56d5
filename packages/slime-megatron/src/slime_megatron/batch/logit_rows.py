"""`LogitRows`: the packed positions whose logits a loss reads, of the response tokens or of whole samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.trees.token_tree import TokenTree, predicting_rows, prompt_length
from slime_megatron.settings.derive import LOGITS


@dataclass(frozen=True)
class LogitRows:
    """Which rows of logits a loss reads. What samples share has rows for each of them."""

    rows: Tensor
    """int64 [L]: packed position of each; one behind the row's last for logits of zero."""
    sequence_tokens: Tensor | None
    """int64 [L]: the ids at these positions, where logits of whole samples are wanted; else they are of response tokens alone."""
    predicting: Tensor
    """int64 [R]: which of the L predict the response tokens."""
    tokens: Tensor | None
    """int64 [R]: ids of the response tokens, where their logits are wanted."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        trees: Sequence[TokenTree],
        needs: Collection[str],
        *,
        row_tokens: int,
        device: torch.device,
    ) -> LogitRows | None:
        """Return the rows that a loss wants; None where it wants none.

        Args:
            batch: the samples.
            trees: of a micro-batch, which no other rank has a part of.
            needs: optional fields of `TokenView` that estimator and loss read.
            row_tokens: tokens of the packed row, its padding included.
            device: of the model.
        """
        if LOGITS.isdisjoint(needs):
            return None
        whole = "sequence_logits" in needs
        rows, predicting = (
            _rows_of_samples(trees, row_tokens)
            if whole
            else (found := predicting_rows(trees), np.arange(len(found)))
        )
        members = [i for tree in trees for i in tree.members]
        of_samples = [batch.tokens[batch.offsets[i] : batch.offsets[i + 1]] for i in members]
        of_responses = [ids[prompt_length(batch, i) :] for i, ids in zip(members, of_samples, strict=True)]

        def put(parts: Sequence[NDArray[Any]]) -> Tensor:
            return upload(np.concatenate(parts).astype(np.int64), device)

        return cls(
            rows=upload(rows, device),
            sequence_tokens=put(of_samples) if whole else None,
            predicting=upload(predicting, device),
            tokens=put(of_responses) if "logits" in needs else None,
        )

    def fields(self, logits: Tensor | None, temperature: float) -> dict[str, Tensor]:
        """Return the fields of `TokenView` that these logits [L, vocabulary] fill; none where there are no logits."""
        if logits is None:
            return {}
        found: dict[str, Tensor] = {}
        if self.sequence_tokens is not None:
            found |= {"sequence_logits": logits, "sequence_tokens": self.sequence_tokens}
        if self.tokens is not None:
            found |= {"logits": logits.index_select(0, self.predicting) / temperature, "tokens": self.tokens}
        return found


def _rows_of_samples(trees: Sequence[TokenTree], zeros: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the packed position of each token of each sample, its last one's being `zeros`; and which predict a response token."""
    rows, predicting = [], []
    start = n_rows = 0
    for tree in trees:
        for path, prompt in zip(tree.paths(), tree.prompts, strict=True):
            rows.append(np.append(start + path, zeros))
            predicting.append(np.arange(n_rows + prompt - 1, n_rows + len(path)))
            n_rows += len(path) + 1
        start += tree.n_tokens
    return np.concatenate(rows), np.concatenate(predicting)
