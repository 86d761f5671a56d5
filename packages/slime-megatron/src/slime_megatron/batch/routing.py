"""What MoE routers read of a micro-batch: which sample each token is of, and which experts it is replayed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.errors import TrainerError
from slime_core.samples import TrainBatch
from slime_models.family.architecture import Architecture
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.trees.segments import segments_of
from slime_megatron.batch.trees.sharing import Routes
from slime_megatron.batch.trees.token_tree import TokenTree


@dataclass(frozen=True)
class StepRouting:
    """What routers read of the optimizer step that a micro-batch is a part of."""

    n_tokens: int
    """Tokens that are forwarded, those that samples share counted once for each."""
    n_samples: int
    """Samples."""
    routes: Sequence[Routes] | None = None
    """The engine's experts for each sample of the batch; None where they are not replayed."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        samples: NDArray[np.int64],
        *,
        depth: int = 0,
        routes: Sequence[Routes] | None = None,
    ) -> StepRouting:
        """Count the tokens and samples of an optimizer step.

        Args:
            batch: the step's samples.
            samples: positions in it of those of the optimizer step.
            depth: of an MTP layer, from 1 (see `batch.mtp_inputs`); 0 for the decoder.
            routes: the engine's experts for each sample.
        """
        lengths = batch.lengths[samples]
        own = lengths - batch.response_lengths[samples] > depth
        n_tokens, n_samples = int((lengths[own] - 1 - depth).sum()), int(own.sum())
        return cls(n_tokens=max(1, n_tokens), n_samples=max(1, n_samples), routes=routes)


@dataclass(frozen=True)
class RoutedTokens:
    """The t tokens that this rank routes, of the n samples of a micro-batch, each of which is a path of segments."""

    copies: Tensor
    """float32 [t]: number of samples that each token is part of; 0 for padding, and in a micro-batch that does not count."""
    segment: Tensor
    """int64 [t]: the segment of each token; any segment where the token is padding."""
    n_segments: int
    """Number of segments."""
    n_samples: int
    """n."""
    path_samples: Tensor
    """int64 [pairs]: the sample of each pair of one and a segment of it."""
    path_segments: Tensor
    """int64 [pairs]: the segment of each."""
    step: StepRouting
    """What losses are averaged over."""
    routes: dict[int, Tensor] = field(default_factory=dict)
    """Layer, from 1 -> int16 [t, topk] on the host: experts of each token, recorded or to be replayed.

    On CUDA recorded ones arrive in the stream's order, and nothing waits for them: only a copy back to the device reads them.
    """


def routed_tokens(
    trees: Sequence[TokenTree],
    source: NDArray[np.int64],
    step: StepRouting,
    *,
    counted: bool,
    device: torch.device,
) -> RoutedTokens:
    """Describe the tokens that a rank routes.

    Args:
        trees: of the packed row, padding not among them.
        source: [t] index in the packed row of each of this rank's tokens, -1 for padding.
        step: of the whole optimizer step.
        counted: whether the micro-batch counts for the loss.
        device: of the model.
    """
    lengths: list[int] = []
    paths, path_segments = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    n_samples, n_segments = 0, 0
    for tree in trees:
        segments, ends = segments_of(tree, at_ends=True)
        number = {segment: n_segments + k for k, segment in enumerate(segments)}
        lengths += [len(segment.rows) for segment in segments]
        for end in ends:
            path = [number[segment] for segment in end.path()]
            paths.append(np.full(len(path), n_samples))
            path_segments.append(np.array(path))
            n_samples += 1
        n_segments += len(segments)
    n_segments = max(1, n_segments)  # padding is of the first one
    pairs = np.concatenate(path_segments)
    segment = np.append(np.repeat(np.arange(len(lengths)), lengths), 0)[source]
    copies = np.bincount(pairs, minlength=n_segments)[segment] * (source >= 0) * counted
    return RoutedTokens(
        copies=upload(copies.astype(np.float32), device),
        segment=upload(segment, device),
        n_segments=n_segments,
        n_samples=n_samples,
        path_samples=upload(np.concatenate(paths), device),
        path_segments=upload(pairs, device),
        step=step,
        routes={} if step.routes is None else _own_routes(trees, source, step.routes),
    )


def _own_routes(
    trees: Sequence[TokenTree], source: NDArray[np.int64], routes: Sequence[Routes]
) -> dict[int, Tensor]:
    """Return the experts of this rank's tokens in each layer; padding goes to experts 0 to topk - 1."""
    row = np.concatenate(
        [
            routes[i][start:stop]
            for tree in trees
            for i, (start, stop) in zip(tree.members, tree.spans, strict=True)
        ]
    )
    own = row[source]
    own[source < 0] = np.arange(row.shape[2], dtype=row.dtype)
    return {layer + 1: torch.from_numpy(own[:, layer].copy()) for layer in range(row.shape[1])}


def engine_routes(batch: TrainBatch, architecture: Architecture) -> list[Routes]:
    """Return the engine's routes of each sample; those of layers without experts are zero, whatever it sent.

    Raises:
        TrainerError: a sample has none, or they are not those of this model; names the sample.
    """
    n_layers, moe_layers = architecture.num_layers, list(architecture.moe_layers)
    n_experts, topk = architecture.num_moe_experts or 0, architecture.moe_router_topk or 0
    given = batch.extra.get("rollout_routed_experts") or [None] * len(batch)
    found = []
    for i, routes in enumerate(given):
        where = f"sample {batch.sample_ids[i]}: rollout_routed_experts"
        if routes is None:
            raise TrainerError(
                f"{where} is missing; use_rollout_routing_replay needs an engine that returns the experts of each "
                "token, and a generator that keeps them"
            )
        array, wanted = np.asarray(routes), (int(batch.lengths[i]) - 1, n_layers, topk)
        if array.shape != wanted:
            raise TrainerError(
                f"{where} has shape {list(array.shape)}; wanted {list(wanted)}: tokens but the last, layers, experts "
                "of a token"
            )
        chosen = array[:, moe_layers]
        if chosen.min() < 0 or chosen.max() >= n_experts:
            raise TrainerError(
                f"{where} holds experts {chosen.min()} to {chosen.max()}; the model's are 0 to {n_experts - 1}"
            )
        ordered = np.sort(chosen, axis=2)
        if (twice := np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])).size:
            token, layer = twice[0][0], moe_layers[twice[0][1]]
            raise TrainerError(
                f"{where} sends token {token} to an expert of layer {layer} twice: {array[token, layer].tolist()}; "
                "wanted different ones. An engine that did not capture a layer leaves zeros"
            )
        routes_of_all = np.zeros(wanted, dtype=np.int16)
        routes_of_all[:, moe_layers] = chosen
        found.append(routes_of_all)
    return found
