"""Which layouts a model and a number of processes allow. Imports neither torch nor megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.errors import TrainerError

from slime_megatron.section import MegatronSection

if TYPE_CHECKING:
    from slime_models.architecture import Architecture


def check_processes(section: MegatronSection, n_processes: int) -> None:
    """Check that the sizes of parallel groups divide the number of processes.

    Raises:
        TrainerError: names the sizes.
    """
    tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    expert_tensor = section.expert_tensor_parallel_size or tensor
    products = {
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"): (
            tensor * pipeline * section.context_parallel_size
        ),
        ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"): (
            expert_tensor * section.expert_model_parallel_size * pipeline
        ),
    }
    for names, product in products.items():
        if n_processes % product:
            raise TrainerError(
                f"{n_processes} processes cannot be cut into {' x '.join(names)} = {product}; "
                f"wanted a divisor of {n_processes}"
            )


def check_model(section: MegatronSection, architecture: Architecture) -> None:
    """Check that the model can be cut as the settings ask.

    Raises:
        TrainerError: names the setting, and what of the model it does not divide.
    """
    if section.use_distributed_optimizer and section.optimizer != "adam":
        raise TrainerError(
            f"use_distributed_optimizer with optimizer {section.optimizer}; Megatron shares the state of adam alone"
        )
    tensor, experts = section.tensor_model_parallel_size, architecture.num_moe_experts
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(section, name) and experts is None:
            raise TrainerError(
                f"{name} replays the experts of each token; a {architecture.model_type} model has none, leave it out"
            )
    divided = [
        (
            "pipeline_model_parallel_size",
            section.pipeline_model_parallel_size,
            "layers",
            architecture.num_layers,
        ),
        ("tensor_model_parallel_size", tensor, "attention heads", architecture.num_attention_heads),
        ("tensor_model_parallel_size", tensor, "query groups", architecture.num_query_groups),
    ]
    if experts is None:
        _refuse_expert_sizes(section, architecture)
        divided.append(("tensor_model_parallel_size", tensor, "MLP columns", architecture.ffn_hidden_size))
    else:
        expert_tensor = section.expert_tensor_parallel_size or tensor
        columns = architecture.moe_ffn_hidden_size or 0
        divided.append(("expert_model_parallel_size", section.expert_model_parallel_size, "experts", experts))
        divided.append(("expert_tensor_parallel_size", expert_tensor, "columns of an expert", columns))
        if tensor > 1 and not section.sequence_parallel:
            raise TrainerError(
                f"tensor_model_parallel_size is {tensor} for a model with experts; add sequence_parallel, "
                "without which every rank would route every token"
            )
    if section.sequence_parallel and tensor == 1:
        raise TrainerError(
            "sequence_parallel shares tokens among tensor-parallel ranks, and tensor_model_parallel_size is 1; "
            "leave it out, or raise the size"
        )
    for name, size, what, number in divided:
        if number % size:
            raise TrainerError(
                f"{name} is {size}; the model's {number} {what} cannot be cut into {size} equal parts, "
                f"choose a divisor of {number}"
            )


def _refuse_expert_sizes(section: MegatronSection, architecture: Architecture) -> None:
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        size = getattr(section, name)
        if size not in (None, 1):
            raise TrainerError(
                f"{name} is {size}; a {architecture.model_type} model has no experts, leave it out"
            )
