"""Settings of the Megatron trainer. The names are Megatron's own flags, so the section has no prefix."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator
from slime_core.config.base import Amount, Bytes, Count, Decay, SectionModel
from slime_core.protocols import TrainerCapabilities
from slime_models.groups import OWN_TRANSPORTS

#: What the trainer can do.
CAPABILITIES = TrainerCapabilities(
    transports=OWN_TRANSPORTS,
    other_transports=True,
    ranked=True,
    background_save=True,
    pools=frozenset({"critic", "ref"}),
    phases=True,
    offloads_weights=True,
    stage_senders=True,
)


class MegatronSection(SectionModel):
    """How Megatron cuts, optimises and recomputes the model."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Count = 1
    """Ranks that share the layers."""
    decoder_first_pipeline_num_layers: Count | None = None
    """Layers of the first pipeline stage; an equal share when not given."""
    decoder_last_pipeline_num_layers: Count | None = None
    """Layers of the last pipeline stage; an equal share when not given."""
    context_parallel_size: Count = 1
    """Ranks that share the tokens of a sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share each expert's matrices; `tensor_model_parallel_size` when not given."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens, too, where they do not share matrices; experts need it."""
    use_distributed_optimizer: bool | None = None
    """Ranks that hold the same weights share the optimizer's state; when not given, wherever there are two of them and the
    optimizer is `adam`."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or plain gradient descent with momentum."""
    sgd_momentum: Decay = 0.9
    """Momentum of gradient descent."""
    balance_data: bool = True
    """Give data-parallel ranks micro-batches of like work (floating point operations); else in turn."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass instead of being kept: whole layers, or attention alone."""
    share_prefix: bool = True
    """Forward once what samples of a group begin with alike: prompts, turns, forks; not done under context parallelism."""
    log_probs_chunk_size: Count = 4096
    """Response tokens whose logits are held at once; in training, logits of the tokens beyond are computed twice."""
    update_weight_buffer_size: Bytes = 512 * 1024**2
    """Bytes of weights that are handed to the engine at once; the next as many are made meanwhile."""
    max_skipped_steps: Count = 3
    """Optimizer steps in a row that may be skipped, because their gradient is not finite, before the run stops; with
    `fp16` only those count that find the scale of the loss at its least."""
    use_routing_replay: bool = False
    """Send each token to the experts that it had in the pass for log-probs, in all optimizer steps of a rollout (R2)."""
    use_rollout_routing_replay: bool = False
    """Send each token to the experts that the engine sent it to, for log-probs and in training (R3); samples carry
    them as `rollout_routed_experts`."""
    enable_mtp_training: bool = False
    """Train the multi-token prediction (MTP) layers of the folder on the policy's samples; the policy's own gradient does
    not change. Without it they are copied unchanged into folders that are written."""
    mtp_loss_scaling_factor: Amount = 0.2
    """Factor of the MTP loss, which is the mean over MTP layers."""
    megatron_args: dict[str, Any] = {}
    """Megatron's own flags by name, for what slime has no setting of; each can also be given as the flag itself."""
    only_train_params_name_list: list[str] = []
    """Regular expressions: of the policy's parameters only those are trained whose Megatron name one matches."""
    freeze_params_name_list: list[str] = []
    """Regular expressions: parameters of the policy whose Megatron name one matches are frozen."""
    custom_megatron_init_path: str | None = None
    """Function that is called once the process groups are there."""
    custom_model_provider_path: str | None = None
    """Function that builds the model."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """Function that is called before each pass for log-probs."""
    rollout_data_postprocess_path: str | None = None
    """Function that sees the data of a step once its advantages are there, and may change them and mask tokens."""
    custom_update_weight_post_write_path: str | None = None
    """Function that gets the folder of each weight update that goes by the disk, before the engine reads it."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """Function that is called before each optimizer step."""

    @field_validator("only_train_params_name_list", "freeze_params_name_list")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"regular expressions ({pattern[:60]!r}: {error})") from error
        return value
