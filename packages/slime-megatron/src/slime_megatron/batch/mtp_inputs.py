"""Inputs of the multi-token prediction (MTP) layers: one packed row of tokens for each depth.

The MTP layer of depth k (from 1) takes, at position j of a sample, the hidden state of the depth before (of the decoder for
k = 1) and the embedding of token j + k, and predicts token j + k + 1. Its loss is on response tokens, as the policy's is: for
a prompt of m tokens and a sample of T tokens, the first response token is predicted at position m - k - 1 and the last at
position T - k - 2.

Source: arXiv 2412.19437, equations 21 to 25.

Tokens that samples share are in the row once, without the last k of them: the inputs at those positions include tokens in
which the samples differ, so each has its own copy of them. The row of a depth is that of a tree of samples without their last
k tokens, which share k tokens less, and predictions are at the same distance from their ends. A sample whose prompt has k
tokens or fewer is left out at depth k, because no position there predicts its first response token.

Under context parallelism nothing is shared and every depth uses the decoder's row; positions after a sample's last
prediction are computed, but nothing reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.packing import PackedSequences, pack
from slime_megatron.batch.routing import StepRouting, routed_tokens
from slime_megatron.batch.trees.token_tree import TokenTree, predicting_rows, prompt_length
from slime_megatron.parallel.token_split import TokenSplit


@dataclass(frozen=True)
class MtpRow:
    """The row of one depth: t tokens, of which r predict response tokens of this rank."""

    rows: Tensor | None
    """int64 [t]: index of each token in the row of the depth before; None where both rows are the same."""
    tokens: Tensor
    """int64 [1, t]: ids of the tokens k positions ahead, whose embeddings the layer takes."""
    packed: PackedSequences
    """Where each tree begins and ends."""
    predicting: Tensor
    """int64 [r]: positions in the row at which response tokens are predicted."""
    targets: Tensor
    """int64 [r]: ids of the response tokens."""
    places: Tensor
    """int64 [r]: index of each among the micro-batch's R response tokens."""


@dataclass(frozen=True)
class HostMicroBatch:
    """A micro-batch on the host."""

    batch: TrainBatch
    trees: Sequence[TokenTree]
    """Its samples, in the order of the packed row."""
    targets: NDArray[np.int64]
    """[R]: index of each response token in the batch's tokens."""
    counted: bool
    """Whether the micro-batch counts for the loss."""

    def is_predicted(self, depth: int) -> NDArray[np.bool_]:
        """Return [R]: whether each response token is of a sample whose prompt is long enough for this depth."""
        own = [
            (prompt_length(self.batch, i) > depth, int(self.batch.response_lengths[i]))
            for tree in self.trees
            for i in tree.members
        ]
        return np.repeat([part for part, _ in own], [n for _, n in own])


def mtp_rows(
    host: HostMicroBatch,
    routing: Sequence[StepRouting],
    rotary: tuple[Tensor, Tensor],
    split: TokenSplit,
) -> tuple[MtpRow, ...]:
    """Return the row of each depth, without context parallelism.

    Args:
        host: the micro-batch.
        routing: the optimizer step, as the routers of each depth see it.
        rotary: cosine and sine of as many positions as the longest sample has tokens.
        split: how tensor-parallel ranks share a row (sequence parallelism).
    """
    batch, device = host.batch, rotary[0].device
    before = list(host.trees)
    found = []
    for depth, step in enumerate(routing, start=1):
        rows = [np.zeros(0, dtype=np.int64)]
        own, ids, start = [], [np.zeros(0, dtype=np.int32)], 0
        for tree in before:
            if (behind := one_behind(tree)) is not None:
                rows += [start + part for part in _rows_of_depth_before(tree, behind)]
                own.append(behind)
                ids.append(behind.ids(batch, ahead=depth))
            start += tree.n_tokens
        n_tokens = sum(tree.n_tokens for tree in own)
        padding = -n_tokens % split.multiple if own else split.multiple
        filled = np.zeros(padding, dtype=np.int64)
        packed = pack([*own, TokenTree.of_prompt(padding)] if padding else own, rotary)
        source = np.concatenate([np.arange(n_tokens), np.full(padding, -1)])
        packed.routed = routed_tokens(own, split.own_part(source), step, counted=host.counted, device=device)
        places = np.flatnonzero(host.is_predicted(depth))
        found.append(
            MtpRow(
                rows=upload(np.concatenate([*rows, filled]), device),
                tokens=upload(np.concatenate([*ids, filled]).astype(np.int64)[None], device),
                packed=packed,
                predicting=upload(predicting_rows(own), device),
                targets=_ids(batch, host.targets[places], device),
                places=upload(places, device),
            )
        )
        before = own
    return tuple(found)


def mtp_chunks(
    host: HostMicroBatch,
    routing: Sequence[StepRouting],
    packed: PackedSequences,
    split: TokenSplit,
    *,
    source: NDArray[np.int64],
    own_row: NDArray[np.int64],
    device: torch.device,
) -> tuple[MtpRow, ...]:
    """Return the row of each depth on a context-parallel rank: its zigzag chunks of the decoder's row.

    Args:
        host: the micro-batch; each tree is one sample.
        routing: the optimizer step, as the routers of each depth see it.
        packed: the decoder's.
        split: how ranks share a row.
        source: [t] index in the whole row of each of this rank's tokens, -1 for padding.
        own_row: index in this rank's row of each token of the whole row, -1 where another rank has it.
        device: of the model.
    """
    batch = host.batch
    predicting = predicting_rows(host.trees)
    found = []
    for depth, step in enumerate(routing, start=1):
        ids, seen = _ahead(host, depth)
        part = host.is_predicted(depth)
        rows = np.where(part, own_row[np.where(part, predicting - depth, 0)], -1)
        places = np.flatnonzero(rows >= 0)
        own_source = split.own_part(np.where(seen[source], source, -1))
        routed = routed_tokens(host.trees, own_source, step, counted=host.counted, device=device)
        found.append(
            MtpRow(
                rows=None,
                tokens=upload(np.where(source < 0, 0, ids[source])[None], device),
                packed=dataclasses.replace(packed, routed=routed),
                predicting=upload(rows[places], device),
                targets=_ids(batch, host.targets[places], device),
                places=upload(places, device),
            )
        )
    return tuple(found)


def one_behind(tree: TokenTree) -> TokenTree | None:
    """Return the tree of the samples without their last tokens, those with a prompt of one token left out; None without any."""
    kept = [k for k, prompt in enumerate(tree.prompts) if prompt > 1]
    if not kept:
        return None
    common = [min(tree.shared[one + 1 : other + 1]) for one, other in pairwise(kept)]
    return TokenTree(
        tuple(tree.lengths[k] - 1 for k in kept),
        (0, *(max(0, shared - 1) for shared in common)),
        tuple(tree.prompts[k] - 1 for k in kept),
        tuple(tree.members[k] for k in kept),
    )


def _rows_of_depth_before(tree: TokenTree, behind: TokenTree) -> list[NDArray[np.int64]]:
    """Return the indices, in the row of the depth before, of the tokens of each sample, without what it shares."""
    paths = [path for path, prompt in zip(tree.paths(), tree.prompts, strict=True) if prompt > 1]
    return [path[start:stop] for path, (start, stop) in zip(paths, behind.spans, strict=True)]


def _ahead(host: HostMicroBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the id `depth` positions ahead of each token of the decoder's row, and whether the position is used."""
    batch, ids, seen = host.batch, [], []
    for i in (i for tree in host.trees for i in tree.members):
        n = int(batch.lengths[i]) - 1
        tokens = batch.tokens[batch.offsets[i] + depth : batch.offsets[i + 1]][:n]
        ids.append(np.pad(tokens.astype(np.int64), (0, n - len(tokens))))
        seen.append((np.arange(n) < n - depth) & (prompt_length(batch, i) > depth))
    return np.concatenate(ids), np.concatenate(seen)


def _ids(batch: TrainBatch, places: NDArray[np.int64], device: torch.device) -> Tensor:
    return upload(batch.tokens[places].astype(np.int64), device)
