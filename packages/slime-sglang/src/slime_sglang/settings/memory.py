"""Memory of the engines `sglang` by arithmetic, before anything starts. Imports neither torch nor sglang at the top."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import SYNC, compute_dtype, is_local, num_ranks
from slime_core.errors import DataError, PluginError
from slime_core.plugins.own_name import means
from slime_core.protocols.memory import MemoryEstimate, Remedy
from slime_core.run.build import resolve_model
from slime_models.groups import is_by_ranks
from slime_models.hf.config import read_config

from slime_sglang.settings.section import (
    ATTENTION_GROUPS,
    DIVIDED,
    FleetSection,
    SglangSection,
    pipeline_stages,
)
from slime_sglang.settings.server import planned_transport
from slime_sglang.settings.topology import EnginePlacement, ServedModel, ServingTopology, serving_topology

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily

#: Tokens of the KV cache on a CPU, where nothing is given (`server.command`).
_CPU_TOKENS = 32768
#: SGLang's own arguments with which weights or KV cache are not what the model's shapes say: with them nothing is predicted.
_CHANGES_SIZES = frozenset(
    {
        *ATTENTION_GROUPS,
        DIVIDED,
        "cpu_offload_gb",
        "kv_cache_dtype",
        "load_format",
        "offload_group_size",
        "quantization",
        "torchao_config",
    }
)
#: Their values that change none.
_UNCHANGED = ("None", "auto", "0")
#: The number of a tensor's layer.
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def engine_memory(question: MemoryQuestion) -> Sequence[MemoryEstimate]:
    """Return what a rank of each engine takes; empty for external servers; nothing of models whose family nobody knows, or that it does not read.

    On CUDA a server fills a share of what is free when it starts (`mem_fraction_static`) with weights and KV cache. Without that
    flag SGLang chooses the share, which is not predicted: then there are weights and one longest request's cache at least.

    Source: `profile_available_bytes` of SGLang, which sizes the cache by the memory that was free before the weights were there.
    """
    fleet = question.section(FleetSection)
    if fleet.rollout_external_engine_addrs:
        return []
    topology = serving_topology(question.settings)
    found: list[MemoryEstimate] = []
    for model in topology.models:
        found += _of_model(question, topology, model)
    return found


def _of_model(
    question: MemoryQuestion, topology: ServingTopology, model: ServedModel
) -> Iterator[MemoryEstimate]:
    section, settings = question.section(SglangSection), question.settings
    is_policy = topology.is_policy(model)
    path = question.model_path
    if not is_policy and model.model_path is not None:
        path = resolve_model(model.model_path, question.registry)
    config = read_config(path)
    chosen = settings.model.model_name if is_policy else None
    try:
        family: ModelFamily = question.registry.resolve(
            "slime.models", str(chosen or config.get("model_type"))
        )
        architecture = family.architecture(config)
    except (DataError, PluginError):
        return  # SGLang may serve it all the same; whoever needs the family says what is wrong
    dtype = section.dtype if section.dtype != "auto" else compute_dtype(settings.train)
    each = 4 if dtype == "float32" else 2
    n_numbers = sum(map(math.prod, family.hf_shapes(architecture).values()))
    shapes = each * n_numbers
    folder = section.model_path if is_policy and section.model_path is not None else path
    whole = min(shapes, _folder_bytes(folder) or shapes)  # quantised weights are fewer bytes
    base = _base_gpu(settings)
    placements = topology.placements(model)
    transport = planned_transport(settings)
    is_staged = is_policy and transport != "disk" and not is_by_ranks(transport, question.registry)
    staged = whole if is_staged else 0
    n_ranks = sum(placement.num_gpus for placement in placements)
    of_kind: dict[str, list[EnginePlacement]] = {}
    for placement in placements:
        of_kind.setdefault(f"{placement.role} {placement.num_gpus} {placement.overrides}", []).append(
            placement
        )
    for first, *rest in of_kind.values():
        arguments = {**section.server_args, **first.overrides}
        if _CHANGES_SIZES & {name for name, value in arguments.items() if str(value) not in _UNCHANGED}:
            continue
        role = "" if first.role == "regular" else f", {first.role}"
        share, limit = arguments.get("mem_fraction_static"), arguments.get("max_total_tokens")
        fills = share is not None and limit is None and question.device.kind == "cuda"
        stages = pipeline_stages(arguments)
        sharing = max(1, first.num_gpus // stages)
        weights = whole * _largest_stage(family, architecture, stages) // (n_numbers * sharing)
        cache = _cache_bytes(question, architecture, arguments, each, stages=stages, sharing=sharing)
        parts = {"weights": weights, "KV cache": cache}
        yield MemoryEstimate(
            who=f"engine sglang{role}" if is_policy else f"engine of {model.name}{role}",
            ranks=first.num_gpus * (1 + len(rest)),
            parts=parts,
            host={"shared memory": staged // n_ranks} if staged else {},
            stays=tuple(parts) if question.device.kind == "cpu" else (),
            updated=("weights",),
            fills=float(str(share)) if fills else None,
            first_device=base + first.first_gpu,
        )


def _base_gpu(settings: Settings) -> int:
    """Return the first GPU of all servers: the user's choice, or what a launcher with places leaves beside all ranks of the trainer."""
    cluster = settings.cluster
    if is_local(settings.run):
        return int(settings.section(SglangSection).server_args.get("base_gpu_id") or 0)
    return 0 if cluster.colocate else sum(num_ranks(settings, role) for role in ("policy", *cluster.pools))


def _cache_bytes(
    question: MemoryQuestion,
    architecture: Architecture,
    arguments: dict[str, Any],
    each: int,
    *,
    stages: int,
    sharing: int,
) -> int:
    """Return the bytes of a rank's KV cache: on CUDA those of one longest request, without which it cannot be served.

    Args:
        question: of the run.
        architecture: of the model.
        arguments: SGLang's own.
        each: bytes of a number.
        stages: of the engine's pipeline; the rank is of one with most layers.
        sharing: ranks of a stage, which share heads.

    Source: `MHATokenToKVPool`, `MLATokenToKVPool` and `HybridLinearKVPool` of SGLang; what an indexer and delta nets keep, and that
    layers with a window keep less, is left out.
    """
    a = architecture
    stage_of = _stages(a, stages)
    layers = max(Counter(stage_of[layer] for layer in a.cached_layers).values(), default=0)
    given = arguments.get("max_total_tokens")
    if question.device.kind == "cpu":
        tokens = int(given or _CPU_TOKENS)
    else:
        tokens = min(question.longest_request, int(given or question.longest_request))
    return layers * a.cache_size(sharing) * each * tokens


def _stages(architecture: Architecture, stages: int) -> list[int]:
    """Return the pipeline stage of each layer: they are shared out evenly, the last stages having one more.

    Source: `get_pp_indices` of SGLang.
    """
    least, rest = divmod(architecture.num_layers, stages)
    return [stage for stage in range(stages) for _ in range(least + (stage >= stages - rest))]


def _largest_stage(family: ModelFamily, architecture: Architecture, stages: int) -> int:
    """Return the numbers in the weights of the pipeline stage that has most.

    Beside its layers the first has the embedding, and the last all else, with an output layer of its own where the model has the
    embedding for one.
    """
    a = architecture
    stage_of = _stages(a, stages)
    sizes = [0] * stages
    for name, shape in family.hf_shapes(a).items():
        layer = _LAYER.search(name)
        is_embedding = name == family.embedding
        if layer is not None and int(layer[1]) < a.num_layers:
            stage = stage_of[int(layer[1])]
        else:
            stage = 0 if is_embedding else stages - 1
        sizes[stage] += math.prod(shape)
        if is_embedding and a.tie_word_embeddings and stages > 1:
            sizes[-1] += math.prod(shape)
    return max(sizes)


def engine_remedies(question: MemoryQuestion) -> Sequence[Remedy]:
    """Return a smaller share than the given one, GPUs of their own, and sharing GPUs in turn. Costs are rules of thumb."""
    section, cluster = question.section(SglangSection), question.settings.cluster
    if question.device.kind == "cpu":
        return []
    given, found = float(section.server_args.get("mem_fraction_static") or 0), []
    for share, slower in ((0.6, 0.05), (0.4, 0.15), (0.2, 0.4)):
        if share >= given:
            continue
        arguments = {**section.server_args, "mem_fraction_static": share}
        found.append(
            Remedy(
                flags={"--sglang-mem-fraction-static": str(share)},
                settings={("sglang", "server_args"): arguments},
                slower=slower,
            )
        )
    if cluster.shares_devices:
        return found
    if means(question.settings.run.loop, SYNC):
        found.append(Remedy(flags={"--colocate": ""}, settings={("cluster", "colocate"): True}, slower=0.1))
    first = cluster.actor_num_gpus_per_node
    if _base_gpu(question.settings) < first:
        arguments = {**section.server_args, "base_gpu_id": first}
        found.append(
            Remedy(
                flags={"--sglang-base-gpu-id": str(first)},
                settings={("sglang", "server_args"): arguments},
                slower=0.0,
                wants="GPUs beside the trainer's",
            )
        )
    return found


def _folder_bytes(folder: Path) -> int | None:
    """Return the bytes of a folder's weights, as they are quantised; None where it has none."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
