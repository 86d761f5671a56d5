"""`SamplingMask`: the ids that top-p and top-k left for each token, over which trainer and engine renormalise alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.errors import TrainerError
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

#: Logit of an id that is masked out: its probability is 0, and unlike -infinity it can be multiplied by 0.
NEVER = -1e30


@dataclass(frozen=True)
class SamplingMask:
    """The ids that each of R tokens was sampled from; an empty list for a token that was sampled from all."""

    ids: Tensor
    """int64: the lists of all tokens, one after another."""
    offsets: NDArray[np.int64]
    """[R + 1] on the host: token i was sampled from ids[offsets[i]:offsets[i + 1]]."""

    def select(self, tokens: NDArray[np.int64], device: torch.device) -> SamplingMask:
        """Return the mask of some of the tokens, given by indices, on a device; this mask is on the host."""
        counts = np.diff(self.offsets)[tokens]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        shifts = np.repeat(self.offsets[tokens] - offsets[:-1], counts)
        return SamplingMask(upload(self.ids.numpy()[np.arange(len(shifts)) + shifts], device), offsets)

    def mask_logits(self, logits: Tensor, first: int, *, start: int) -> None:
        """Set the logits of ids that are masked out to `NEVER`, in place.

        Args:
            logits: [n, columns] of tokens `first` to `first + n - 1`.
            first: index among the R tokens of the first row.
            start: id of the first column.
        """
        (n, width), device = logits.shape, logits.device
        offsets = self.offsets[first : first + n + 1]
        counts = upload(np.diff(offsets), device)
        columns = self.ids[offsets[0] : offsets[-1]] - start
        rows = torch.arange(n, device=device).repeat_interleave(counts, output_size=len(columns))
        here = (columns >= 0) & (columns < width)
        others = (counts > 0)[:, None].repeat(1, width + 1)  # the last column is for ids of other ranks
        others[rows, columns.where(here, width)] = False
        logits.masked_fill_(others[:, :width], NEVER)


def sampling_mask_of(batch: TrainBatch) -> SamplingMask:
    """Return the sampling mask of a batch's response tokens.

    Raises:
        TrainerError: a sample with trained tokens has no mask, or a trained token is masked out; names the sample.
    """
    given = batch.extra.get("rollout_top_p_tokens") or [None] * len(batch)
    ids, counts = [], []
    for i, held in enumerate(given):
        span = slice(int(batch.response_offsets[i]), int(batch.response_offsets[i + 1]))
        trained = batch.loss_mask[span] > 0
        if held is None:
            if trained.any():
                raise TrainerError(
                    f"sample {batch.sample_ids[i]}: rollout_top_p_token_ids is missing; rollout_top_p and rollout_top_k "
                    "need a generator that keeps the ids that the engine drew each token from"
                )
            counts.append(np.zeros(len(trained), dtype=np.int64))
            continue
        own, offsets = np.asarray(held[0], dtype=np.int64), np.asarray(held[1], dtype=np.int64)
        sizes = np.diff(offsets)
        tokens = batch.tokens[int(batch.offsets[i + 1]) - len(trained) : int(batch.offsets[i + 1])]
        hits = np.concatenate([[0], np.cumsum(own == np.repeat(tokens, sizes))])
        is_among = np.diff(hits[offsets]) > 0
        if (bad := np.flatnonzero(trained & (sizes > 0) & ~is_among)).size:
            raise TrainerError(
                f"sample {batch.sample_ids[i]}: response token {bad[0]} (id {tokens[bad[0]]}) is not among the "
                f"{sizes[bad[0]]} ids of rollout_top_p_token_ids that it was drawn from"
            )
        ids.append(own)
        counts.append(sizes)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return SamplingMask(torch.from_numpy(np.concatenate([*ids, np.empty(0, np.int64)])), offsets)
