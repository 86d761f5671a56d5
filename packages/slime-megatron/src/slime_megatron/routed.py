"""What the routers of a model with experts are told of a micro-batch's tokens: whose they are, and where they are to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.batch import TrainBatch
from slime_core.errors import TrainerError
from slime_models.architecture import Architecture
from torch import Tensor

from slime_megatron.packed import Family

#: The experts of each token of a sample but the last: int16 [tokens - 1, layers, topk].
Routes = NDArray[np.int16]


@dataclass(frozen=True)
class StepRouting:
    """Of the optimizer step that a micro-batch is a part of."""

    n_tokens: int
    """Tokens that are forwarded, those of a shared prompt once for each sample."""
    n_samples: int
    """Samples."""
    routes: Sequence[Routes] | None = None
    """The engine's, of each sample of the batch; None where they are not replayed."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        samples: NDArray[np.int64],
        *,
        depth: int = 0,
        routes: Sequence[Routes] | None = None,
    ) -> StepRouting:
        """Return that of some samples of a batch.

        Args:
            batch: holds them.
            samples: their positions in it.
            depth: of the layer that predicts further tokens, from 1 (see `mtp_rows`); 0 for the decoder.
            routes: the engine's.
        """
        lengths = batch.lengths[samples]
        own = lengths - batch.response_lengths[samples] > depth
        n_tokens, n_samples = int((lengths[own] - 1 - depth).sum()), int(own.sum())
        return cls(n_tokens=max(1, n_tokens), n_samples=max(1, n_samples), routes=routes)


@dataclass(frozen=True)
class RoutedTokens:
    """The t tokens that this rank routes, of the n samples of a micro-batch.

    A sample is two stretches of tokens: its prompt, which it may share, and its continuation.
    """

    copies: Tensor
    """float32 [t]: samples that each token is part of; 0 for padding, and for all of an uncounted micro-batch."""
    stretch: Tensor
    """int64 [t]: the stretch that each token is in; any, where it is padding."""
    n_stretches: int
    """How many there are."""
    prompts: Tensor
    """int64 [n]: the stretch that is each sample's prompt."""
    continuations: Tensor
    """int64 [n]: the stretch that is each sample's continuation."""
    step: StepRouting
    """What losses are averaged over."""
    routes: dict[int, Tensor] = field(default_factory=dict)
    """Layer, from 1 -> int16 [t, topk] on the host: experts of each token, where they are recorded or given."""


def routed_tokens(
    families: Sequence[Family],
    order: Sequence[Sequence[int]],
    source: NDArray[np.int64],
    step: StepRouting,
    *,
    counted: bool,
    device: torch.device,
) -> RoutedTokens:
    """Describe the tokens that a rank routes.

    Args:
        families: of the packed row.
        order: the positions in the batch of each family's samples.
        source: [t] which token of the packed row each of them is, -1 for padding.
        step: of the whole optimizer step.
        counted: whether the micro-batch counts for the loss.
        device: of the model.
    """
    lengths: list[int] = []
    copies: list[int] = []
    prompts: list[int] = []
    continuations: list[int] = []
    for family in families:
        prompt = len(lengths)
        lengths.append(family.prompt)
        copies.append(len(family.continuations))
        for n in family.continuations:
            prompts.append(prompt)
            continuations.append(len(lengths))
            lengths.append(n)
            copies.append(1)
    stretch = np.repeat(np.arange(len(lengths)), lengths)[source]
    own_copies = np.array(copies, dtype=np.float32)[stretch] * (source >= 0) * counted
    return RoutedTokens(
        copies=torch.from_numpy(own_copies.astype(np.float32)).to(device),
        stretch=torch.from_numpy(stretch).to(device),
        n_stretches=len(lengths),
        prompts=torch.tensor(prompts, dtype=torch.int64, device=device),
        continuations=torch.tensor(continuations, dtype=torch.int64, device=device),
        step=step,
        routes={} if step.routes is None else _own_routes(families, order, source, step.routes),
    )


def _own_routes(
    families: Sequence[Family],
    order: Sequence[Sequence[int]],
    source: NDArray[np.int64],
    routes: Sequence[Routes],
) -> dict[int, Tensor]:
    """Return the experts of this rank's tokens in each layer; padding goes to the first ones."""
    parts: list[Routes] = []
    for family, members in zip(families, order, strict=True):
        parts.append(routes[members[0]][: family.prompt])
        parts += [routes[i][family.prompt :] for i in members]
    row = np.concatenate(parts)
    own = row[source]
    own[source < 0] = np.arange(row.shape[2], dtype=row.dtype)
    return {layer + 1: torch.from_numpy(own[:, layer].copy()) for layer in range(row.shape[1])}


def engine_routes(batch: TrainBatch, architecture: Architecture) -> list[Routes]:
    """Return the engine's routes of each sample; those of layers without experts are zero, whatever it sent.

    Raises:
        TrainerError: a sample has none, or they are not those of this model; names the sample.
    """
    n_layers, moe_layers = architecture.num_layers, list(architecture.moe_layers)
    n_experts, topk = architecture.num_moe_experts, architecture.moe_router_topk
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
