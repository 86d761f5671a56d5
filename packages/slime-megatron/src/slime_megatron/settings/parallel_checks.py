"""Checks of parallel sizes against the number of processes and the model. Imports neither torch nor megatron."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime_core.errors import Problem, TrainerError

from slime_megatron.settings.model_flags import contradictions
from slime_megatron.settings.section import MegatronSection

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily

#: Kind of parallelism, as `ModelFamily.not_parallel` names it -> the setting, and its value without.
_SETTING_OF: dict[str, tuple[str, object]] = {
    "tensor": ("tensor_model_parallel_size", 1),
    "sequence": ("sequence_parallel", False),
    "pipeline": ("pipeline_model_parallel_size", 1),
    "context": ("context_parallel_size", 1),
    "expert": ("expert_model_parallel_size", 1),
    "expert_tensor": ("expert_tensor_parallel_size", 1),
}


def check_processes(section: MegatronSection, n_processes: int) -> None:
    """Check that the sizes of parallel groups divide the number of processes.

    Raises:
        TrainerError: names the sizes.
    """
    _refuse(process_problems(section, n_processes))


def check_model(section: MegatronSection, architecture: Architecture, family: ModelFamily) -> None:
    """Check that the model can be parallelised as the settings ask.

    Raises:
        TrainerError: names the setting, and what of the model it does not divide.
    """
    _refuse(model_problems(section, architecture, family))


def process_problems(section: MegatronSection, n_processes: int) -> Iterator[Problem]:
    """Yield each product of sizes that does not divide the number of processes."""
    tensor, expert_tensor = section.tensor_model_parallel_size, section.expert_tensor_parallel_size
    pipeline, experts = section.pipeline_model_parallel_size, section.expert_model_parallel_size
    products = [
        {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": section.context_parallel_size,
        }
    ]
    if experts > 1 or expert_tensor is not None:  # else this product divides the one above
        products.append(
            {
                "expert_tensor_parallel_size": expert_tensor or tensor,
                "expert_model_parallel_size": experts,
                "pipeline_model_parallel_size": pipeline,
            }
        )
    for sizes in products:
        product = 1
        for size in sizes.values():
            product *= size
        if n_processes % product:
            given = {name: size for name, size in sizes.items() if size > 1}
            yield Problem(
                " x ".join(f"megatron.{name}" for name in given),
                f"{' x '.join(map(str, given.values()))}{f' = {product}' if len(given) > 1 else ''} "
                f"and {n_processes} {'process' if n_processes == 1 else 'processes'}",
                f"a divisor of {n_processes}",
                "lower it, or raise --actor-num-gpus-per-node or --actor-num-nodes (--launcher ray)",
            )


def model_problems(
    section: MegatronSection, architecture: Architecture, family: ModelFamily
) -> Iterator[Problem]:
    """Yield each parallel setting that the model does not allow, and each flag that says of the model what config.json does not."""
    yield from _family_problems(section, family)
    yield from contradictions(section.megatron_args, architecture)
    if section.use_distributed_optimizer and section.optimizer != "adam":
        yield Problem(
            "megatron.use_distributed_optimizer",
            f"it with optimizer {section.optimizer}",
            "optimizer adam, whose state alone Megatron shares",
        )
    tensor, experts = section.tensor_model_parallel_size, architecture.num_moe_experts
    yield from _router_problems(section, architecture)
    yield from _mtp_problems(section, architecture)
    yield from _stages(section, architecture)
    yield from _layout_problems(section)
    divided = [
        ("tensor_model_parallel_size", tensor, what, number)
        for what, number in architecture.tensor_parts.items()
    ]
    if len(architecture.moe_layers) < architecture.num_layers:
        divided.append(("tensor_model_parallel_size", tensor, "MLP columns", architecture.ffn_hidden_size))
    if experts is None:
        yield from _expert_sizes(section, architecture)
    else:
        shared = architecture.moe_shared_expert_intermediate_size or 0
        divided.append(("tensor_model_parallel_size", tensor, "columns of the shared expert", shared))
        expert_tensor = section.expert_tensor_parallel_size or tensor
        columns = architecture.moe_ffn_hidden_size or 0
        divided.append(("expert_model_parallel_size", section.expert_model_parallel_size, "experts", experts))
        divided.append(("expert_tensor_parallel_size", expert_tensor, "columns of an expert", columns))
        if tensor > 1 and not section.sequence_parallel:
            yield Problem(
                "megatron.tensor_model_parallel_size",
                f"{tensor} for a model with experts",
                "sequence_parallel with it, without which every rank would route every token",
            )
    if section.sequence_parallel and tensor == 1:
        yield Problem(
            "megatron.sequence_parallel",
            "it with tensor_model_parallel_size 1",
            "a size of 2 or more: tensor-parallel ranks are those that share tokens",
        )
    for name, size, what, number in divided:
        if number % size:
            yield Problem(f"megatron.{name}", str(size), f"a divisor of {number}, the model's {what}")


def _stages(section: MegatronSection, architecture: Architecture) -> Iterator[Problem]:
    """Yield that layers cannot be divided into the pipeline's stages."""
    size, layers = section.pipeline_model_parallel_size, architecture.num_layers
    own = {
        name: count
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if (count := getattr(section, name)) is not None
    }
    if own and size < 2:
        yield Problem(
            f"megatron.{min(own)}", f"it with pipeline_model_parallel_size {size}", "2 stages or more"
        )
        return
    left, stages = layers - sum(own.values()), size - len(own)
    if not own and layers % size:
        wanted = f"a divisor of {layers}, the model's layers"
        todo = "or say how many the first or last stage has: --decoder-last-pipeline-num-layers"
        yield Problem("megatron.pipeline_model_parallel_size", str(size), wanted, todo)
    elif own and (left < stages or (stages and left % stages) or (not stages and left)):
        found = " and ".join(f"{name} {count}" for name, count in own.items())
        wanted = (
            f"numbers that leave the same number of its {layers} layers to each of the other {stages} stages"
        )
        yield Problem("megatron.pipeline_model_parallel_size", f"{size} with {found}", wanted)


def _layout_problems(section: MegatronSection) -> Iterator[Problem]:
    """Yield that layers are laid out over more or fewer stages than there are."""
    name, size = "pipeline_model_parallel_layout", section.pipeline_model_parallel_size
    layout = section.megatron_args.get(name)
    if layout is not None and (stages := _n_stages(str(layout))) != size:
        yield Problem(
            f"megatron.megatron_args.{name}",
            f"{layout}, of {stages} {'stage' if stages == 1 else 'stages'}",
            f"{size}, which is pipeline_model_parallel_size: a rank has one stage of consecutive layers, and no virtual ones",
        )


def _n_stages(layout: str) -> int:
    """Return the number of stages of a layout such as `Et*3|(tt|)*29,m|L`.

    Source: `PipelineParallelLayerLayout.parse_str_to_list` of megatron-core 0.19.2. Here a number has three digits at most.
    """
    layout = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):
        layout = re.sub(repeated, lambda found: found[1] * int(found[2]), layout)
    return layout.count("|") + 1


def _family_problems(section: MegatronSection, family: ModelFamily) -> Iterator[Problem]:
    """Yield each kind of parallelism that the family says it does not have."""
    for kind, why in family.not_parallel.items():
        name, alone = _SETTING_OF[kind]
        given = getattr(section, name)
        if given is None:
            given = section.tensor_model_parallel_size
        if given != alone:
            yield Problem(f"megatron.{name}", str(given), f"{alone} for a {family.model_type} model", why)


def _router_problems(section: MegatronSection, architecture: Architecture) -> Iterator[Problem]:
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(section, name) and architecture.num_moe_experts is None:
            yield Problem(
                f"megatron.{name}",
                f"it with a {architecture.model_type} model, which has no experts",
                "a model that routes tokens, or to leave it out",
            )
    if (
        section.megatron_args.get("moe_router_enable_expert_bias")
        and not architecture.moe_router_enable_expert_bias
    ):
        yield Problem(
            "megatron.megatron_args.moe_router_enable_expert_bias",
            f"it with a {architecture.model_type} model, whose folder has no bias of routers",
            "a model that has one, such as glm4_moe",
            "balance experts by --moe-aux-loss-coeff",
        )


def _mtp_problems(section: MegatronSection, architecture: Architecture) -> Iterator[Problem]:
    if section.enable_mtp_training and not architecture.mtp_num_layers:
        yield Problem(
            "megatron.enable_mtp_training",
            f"it with a {architecture.model_type} model whose config gives no num_nextn_predict_layers",
            "a folder with multi-token prediction (MTP) layers, such as GLM-4.5's",
            "drop the flag",
        )
    given = section.megatron_args.get("mtp_num_layers")
    if given is None:
        return
    if not section.enable_mtp_training:
        yield Problem(
            "megatron.megatron_args.mtp_num_layers",
            f"{given} without enable_mtp_training",
            "both, or neither: multi-token prediction (MTP) layers are built only to be trained",
        )
    elif str(given) != str(architecture.mtp_num_layers):
        yield Problem(
            "megatron.megatron_args.mtp_num_layers",
            str(given),
            f"{architecture.mtp_num_layers}, the num_nextn_predict_layers of the model's config.json",
            "drop the flag: the folder says it",
        )


def _expert_sizes(section: MegatronSection, architecture: Architecture) -> Iterator[Problem]:
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        size = getattr(section, name)
        if size not in (None, 1):
            yield Problem(
                f"megatron.{name}", str(size), f"1: a {architecture.model_type} model has no experts"
            )


def _refuse(problems: Iterable[Problem]) -> None:
    found = [str(problem) for problem in problems]
    if found:
        raise TrainerError("\n".join(found))
