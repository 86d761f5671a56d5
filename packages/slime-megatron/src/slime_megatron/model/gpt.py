"""Building Megatron's GPTModel, wrapping it for gradients, and log-probs of response tokens as its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_core.errors import TrainerError
from slime_models.family.architecture import Architecture
from torch import Tensor
from torch.nn import functional

from slime_megatron.batch.response_tokens import ResponseTokens
from slime_megatron.model.family_layers import FamilyLayers, block_spec
from slime_megatron.model.layers.router import check_routers, updates_bias
from slime_megatron.model.log_probs import VocabularyShard, sum_pi_squared, token_log_probs
from slime_megatron.model.mtp import MtpBlock, whole_row
from slime_megatron.model.transformer_config import transformer_config
from slime_megatron.parallel.context_parallel import GatherTokens
from slime_megatron.settings.derive import shares_optimizer
from slime_megatron.settings.megatron_flags import with_flags
from slime_megatron.settings.section import MegatronSection


def build_model(
    architecture: Architecture,
    section: MegatronSection,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    layers: FamilyLayers | None = None,
    provider: Callable[..., GPTModel] | None = None,
) -> GPTModel:
    """Return this rank's part of the model, its weights not yet set.

    Args:
        architecture: of the model.
        section: how it is parallelised.
        dtype: of its parameters.
        device: where they are.
        layers: those that the family brings; None where `architecture` says all of them.
        provider: builds the model in the place of `provide_model`; takes the same arguments, but not `layers`.
    """
    layers = layers or FamilyLayers()
    config = transformer_config(architecture, section, dtype=dtype, own=layers.config(architecture))
    model = (provider or partial(provide_model, layers=layers))(
        config,
        architecture,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    check_routers(model, config, updates_bias=updates_bias(section))
    if model.post_process:
        _check_output_layer(model.output_layer)
        if architecture.holds_mtp:
            last = architecture.num_layers - 1
            model.mtp = MtpBlock(
                model, architecture.mtp_num_layers, lambda own: layers.layer(own, architecture, last)
            )
    return model.to(device)


def _check_output_layer(layer: Any) -> None:
    """Check that logits are hidden states times the layer's weight: `response_log_probs` does not call it."""
    if type(layer) is not tensor_parallel.ColumnParallelLinear or layer.bias is not None:
        raise TrainerError(
            f"custom_model_provider_path: the model's output_layer is a {type(layer).__name__}; wanted Megatron's "
            "ColumnParallelLinear without a bias: log-probs are computed from its weight, a chunk of tokens at a time"
        )


def provide_model(
    config: TransformerConfig,
    architecture: Architecture,
    *,
    pre_process: bool,
    post_process: bool,
    layers: FamilyLayers | None = None,
) -> GPTModel:
    """Return a model on the CPU, its weights not yet set.

    Args:
        config: Megatron's.
        architecture: what `config` follows from, and the sizes of the vocabulary.
        pre_process: whether this pipeline stage has the embedding.
        post_process: whether it has the output layer.
        layers: those that the family brings; None where `architecture` says all of them.
    """
    layers = layers or FamilyLayers()
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, architecture, layers),
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="none",  # `PackedAttention` rotates
    )
    layers.finish(model, architecture)
    return model


def wrap_for_gradients(model: GPTModel, section: MegatronSection) -> DistributedDataParallel:
    """Wrap the model so that gradients of all micro-batches and ranks add up in float32 buffers.

    On CUDA ranks add the gradients of a bucket up while the last micro-batch's backward pass computes those of the next. How large
    a bucket is says `--ddp-bucket-size`. Where nothing is added up meanwhile, there is one bucket.

    Raises:
        TrainerError: one of Megatron's own flags contradicts that; names both.
    """
    n_ranks = torch.distributed.get_world_size()
    ours = partial(
        DistributedDataParallelConfig,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=torch.cuda.is_available() and n_ranks > 1,
        use_distributed_optimizer=shares_optimizer(section, n_ranks),
    )
    config = with_flags(ours, section.megatron_args, "ddp", defaults={"overlap_grad_reduce"})
    if config.bucket_size is not None and not config.overlap_grad_reduce and n_ranks > 1:
        raise TrainerError(
            f"--ddp-bucket-size {config.bucket_size}: found it without --overlap-grad-reduce, where Megatron has one bucket; wanted "
            "both, or neither"
        )
    wrapped = DistributedDataParallel(model.config, config, model)
    if config.overlap_grad_reduce:  # until the last micro-batch
        model.config.no_sync_func = wrapped.no_sync
    return wrapped


class Predicted(NamedTuple):
    """What the model says of a micro-batch's response tokens."""

    numbers: Tensor
    """float32 [k, R]; see `response_log_probs`."""
    logits: Tensor | None
    """float32 [L, vocabulary], of `ResponseTokens.logits`; None where none are wanted."""

    @property
    def device(self) -> torch.device:
        """Where it is, for which Megatron's schedules ask the model's output."""
        return self.numbers.device


def response_log_probs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: ResponseTokens,
    config: TransformerConfig,
    chunk_tokens: int,
    mtp: MtpBlock | None = None,
    **_: Any,
) -> Predicted:
    """Return log-probs, then entropies and sums of squared probabilities where wanted: [1 to 3, R].

    With gradient, the log-probs that each MTP layer gives follow: [1 to 2 + layers, R]; and logits, where a loss reads them.

    The `output_processor` of GPTModel, in place of logits. Selecting rows before the output layer saves the logits of prompt
    tokens, most of the layer's work when prompts are long.
    """
    ranks = parallel_state.get_tensor_model_parallel_group()
    hidden = response_rows(hidden_states, context, config)
    weight = output_layer.weight if output_weight is None else output_weight
    vocabulary = VocabularyShard(
        size=context.vocab_size,
        start=ranks.rank() * len(weight),
        group=ranks if ranks.size() > 1 else None,
    )
    log_probs, entropy = token_log_probs(
        tensor_parallel.copy_to_tensor_model_parallel_region(hidden),  # adds the gradient up over the ranks
        weight,
        context.targets,
        vocabulary=vocabulary,
        temperature=context.temperature,
        sampling_mask=context.sampling_mask,
        with_entropy=context.with_entropy,
        chunk_tokens=chunk_tokens,
    )
    parts = [log_probs] if entropy is None else [log_probs, entropy]
    if context.with_sum_pi_squared and not torch.is_grad_enabled():
        parts.append(
            sum_pi_squared(
                hidden,
                weight,
                vocabulary=vocabulary,
                temperature=context.temperature,
                sampling_mask=context.sampling_mask,
                chunk_tokens=chunk_tokens,
            )
        )
    parts = [gather_response_tokens(part, context) for part in parts]
    if mtp is not None and torch.is_grad_enabled():
        states = mtp(hidden_states, context.mtp_rows)
        parts += _mtp_log_probs(states, weight.detach(), context, vocabulary, chunk_tokens=chunk_tokens)
    logits = None
    if context.logits is not None and torch.is_grad_enabled():
        logits = _whole_logits(hidden_states, weight, context, config)
    return Predicted(torch.stack(parts), logits)


def _whole_logits(
    hidden_states: Tensor, weight: Tensor, context: ResponseTokens, config: TransformerConfig
) -> Tensor:
    """Return the logits that a loss reads, float32 [L, vocabulary], gathered from the tensor-parallel ranks.

    Each of these computes the whole loss, and so the whole gradient, of which it takes that of its own columns.
    """
    assert context.logits is not None
    states = functional.pad(whole_row(hidden_states, config).squeeze(1), (0, 0, 0, 1))
    states = states.index_select(0, context.logits.rows)
    own = functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(states), weight)
    whole: Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(own)
    return whole[:, : context.vocab_size].float()


def _mtp_log_probs(
    states: Iterable[Tensor],
    weight: Tensor,
    context: ResponseTokens,
    vocabulary: VocabularyShard,
    *,
    chunk_tokens: int,
) -> Iterator[Tensor]:
    """Yield the log-probs [R] that each MTP layer gives, 0 for response tokens that it does not predict."""
    for row, predicting in zip(context.mtp_rows, states, strict=True):
        found, _ = token_log_probs(
            tensor_parallel.copy_to_tensor_model_parallel_region(predicting),
            weight,
            row.targets,
            vocabulary=vocabulary,
            temperature=context.temperature,
            chunk_tokens=chunk_tokens,
        )
        yield GatherTokens.apply(found, row.places, context.n_tokens, context.context)


def response_rows(hidden_states: Tensor, context: ResponseTokens, config: TransformerConfig) -> Tensor:
    """Return the hidden states [r, hidden_size] from which this rank's response tokens are predicted.

    Args:
        hidden_states: [t, 1, hidden_size]; this rank's part of t under sequence parallelism.
        context: the tokens.
        config: the model's.
    """
    return whole_row(hidden_states, config).squeeze(1).index_select(0, context.rows)


def gather_response_tokens(own: Tensor, context: ResponseTokens) -> Tensor:
    """Return values of all R response tokens from this rank's [r], gathered from context-parallel ranks."""
    if context.repeats is not None:
        return own.index_select(0, context.repeats)
    if context.places is None:
        return own
    whole: Tensor = GatherTokens.apply(own, context.places, context.n_tokens, context.context)
    return whole
