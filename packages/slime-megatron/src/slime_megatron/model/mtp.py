"""Multi-token prediction (MTP) layers on the last pipeline stage: Megatron's own, with our inputs and our loss.

They are trained on the policy's hidden states without changing the policy: hidden states, embedding and output layer reach
them detached, and their gradient is clipped by a norm of its own. Their inputs are in `batch.mtp_inputs`.

Megatron 0.19.2 shifts ids within `cu_seqlens`, which is wrong where samples that share tokens follow one another, and its
loss (`process_mtp_loss`) takes the logits of all tokens at once, those of prompts included, weighted by micro-batch. So the
layers are given their ids here, and the log-probs of their predictions are computed in `model.gpt`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_megatron.batch.mtp_inputs import MtpRow
from slime_megatron.model.layers.norm import RMSNorm


class MtpLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer, which takes the ids that it embeds as they are."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        embedding: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        if not hidden_states.requires_grad:  # a layer is recomputed only where its input wants a gradient
            hidden_states.requires_grad_()
        return input_ids, position_ids, padding_mask, embedding(input_ids), hidden_states


class MtpBlock(MultiTokenPredictionBlock):
    """All MTP layers, one for each depth; names of weights and checkpoints are those of Megatron's block.

    Args:
        model: the last pipeline stage; MTP layers are built like its last layer.
        n_layers: number of MTP layers.
        decoder_layer: (config) -> Megatron's specification of the decoder layer that each is built around.
    """

    def __init__(
        self, model: GPTModel, n_layers: int, decoder_layer: Callable[[TransformerConfig], ModuleSpec]
    ) -> None:
        config = copy.copy(model.config)
        config.mtp_num_layers = n_layers  # of the block alone: where the model has it, Megatron adds its loss
        if config.recompute_method == "uniform":
            config.recompute_num_layers = 1  # each MTP layer is a block of its own
        config.mtp_detach_heads = (
            True  # marks the parameters, so that `optim.optimizer.update` clips them apart
        )
        spec = ModuleSpec(
            module=MtpLayer,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=RMSNorm,
                hnorm=RMSNorm,
                layer_norm=RMSNorm,
                eh_proj=ColumnParallelLinear,
                mtp_model_layer=decoder_layer(config),
            ),
        )
        layers = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * n_layers)
        super().__init__(config=config, spec=layers, pg_collection=model.pg_collection)
        #: Returns this rank's rows of the policy's embedding, detached: they are no parameters of these layers.
        self._embedding: Callable[[], Tensor] | None = None
        if model.pre_process or model.share_embeddings_and_output_weights:
            layer = model.embedding.word_embeddings if model.pre_process else model.output_layer
            self._embedding = lambda: layer.weight.detach()

    def receive(self, embedding: Tensor) -> None:
        """Take the first stage's embedding, where this stage has none."""
        self._embedding = lambda: embedding

    def forward(self, hidden_states: Tensor, rows: Sequence[MtpRow]) -> Iterator[Tensor]:
        """Yield for each depth the hidden states [r, hidden_size] that predict this rank's response tokens.

        Args:
            hidden_states: [t, 1, hidden_size] of the decoder, after its last norm.
            rows: the inputs of each depth.
        """
        hidden = hidden_states.detach()
        for layer, row in zip(self.layers, rows, strict=True):
            if row.rows is not None:
                hidden = whole_row(hidden, self.config).index_select(0, row.rows)
                if self.config.sequence_parallel:
                    hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
            hidden, *_ = layer(
                input_ids=row.tokens,
                position_ids=None,
                hidden_states=hidden,
                attention_mask=None,
                packed_seq_params=row.packed,
                embedding=self._embed,
            )
            yield whole_row(hidden, self.config).squeeze(1).index_select(0, row.predicting)

    @torch.no_grad()
    def _embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids [1, t], [t, 1, hidden_size]; this rank's part of t under sequence parallelism."""
        assert self._embedding is not None
        weight, group = self._embedding(), parallel_state.get_tensor_model_parallel_group()
        own = ids.t() - group.rank() * len(weight)
        here = (own >= 0) & (own < len(weight))
        rows = F.embedding(own.where(here, 0), weight) * here[..., None]
        own_tokens: Tensor = (
            tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
            if self.config.sequence_parallel
            else tensor_parallel.reduce_from_tensor_model_parallel_region(rows)
        )
        return own_tokens


def mtp_loss(log_probs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the MTP loss, and its shares of metrics.

    The loss of a layer is the cross-entropy of response tokens, weighted as in the policy's loss; the MTP loss is the mean
    over layers.

    Args:
        log_probs: [layers, R].
        weights: [R], each token's share of the optimizer step's loss.

    Source: arXiv 2412.19437, equations 24 and 25.
    """
    losses = -(log_probs @ weights)
    mean = losses.mean()
    each = {f"mtp_{depth}_loss": loss for depth, loss in enumerate(losses.detach(), start=1)}
    return mean, {"mtp_loss": mean.detach()} | each


def whole_row(hidden_states: Tensor, config: TransformerConfig) -> Tensor:
    """Return the hidden states of all tokens of a row: gathered from the ranks under sequence parallelism."""
    if not config.sequence_parallel:
        return hidden_states
    whole: Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=False
    )
    return whole


def share_embedding(model: GPTModel) -> None:
    """Broadcast the first pipeline stage's embedding to the last one. Collective over both stages.

    Does nothing where they are one stage, or where the output layer is tied to the embedding.
    """
    apart = model.pre_process != model.post_process
    if not apart or model.share_embeddings_and_output_weights:
        return
    stages = parallel_state.get_embedding_group()
    if model.pre_process:
        weight = model.embedding.word_embeddings.weight.detach()
    else:
        weight = torch.empty_like(model.output_layer.weight, requires_grad=False)
        model.mtp.receive(weight)
    dist.broadcast(weight, dist.get_global_rank(stages, 0), group=stages)
