"""What of a model cannot be divided between the ranks of an engine. Imports neither torch nor sglang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.errors import Problem

from slime_sglang.settings.section import (
    ATTENTION_GROUPS,
    DIVIDED,
    EXPERT_GROUPS,
    REPLICAS,
    number_of,
    pipeline_stages,
)
from slime_sglang.settings.topology import ServedModel, ServingTopology


def rank_problems(
    topology: ServingTopology,
    model: ServedModel,
    config: Mapping[str, Any],
    *,
    on_cpu: bool,
    server_args: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Yield what of a model cannot be divided between an engine's ranks: layers, heads, and rows of feed-forward layers.

    Args:
        topology: of the run.
        model: of the topology.
        config: its Hugging Face configuration.
        on_cpu: whether it is served without GPUs, where SGLang replicates no heads of keys and values.
        server_args: SGLang's own, under those of each engine: pipeline stages, attention that is divided into `dp_size` copies,
            experts between `ep_size` ranks.
    """
    found: dict[Problem, None] = {}  # each once, in their order
    for placement in topology.placements(model):
        given = {**(server_args or {}), **placement.overrides}
        found |= dict.fromkeys(_problems(model, placement.num_gpus, given, config, on_cpu=on_cpu))
    yield from found


def _problems(
    model: ServedModel, n_gpus: int, given: Mapping[str, Any], config: Mapping[str, Any], *, on_cpu: bool
) -> Iterator[Problem]:
    """Yield what cannot be divided between the ranks of one engine with these arguments."""
    where = f"GPUs of an engine of {model.name!r}"
    hint = "--rollout-num-gpus-per-engine or num_gpus_per_engine says it"
    stages = pipeline_stages(given)
    if n_gpus % stages:
        yield Problem(where, f"{n_gpus} with pp_size {stages}", f"a multiple of {stages}", hint)
        return
    layers = config.get("num_hidden_layers", stages)
    if stages > layers:
        yield Problem(
            f"pp_size of an engine of {model.name!r}",
            f"{stages}",
            f"{layers} at most, a layer for each stage",
        )
    copies = number_of(given, ATTENTION_GROUPS)
    if given.get(DIVIDED) and copies == 1:
        copies = number_of(given, REPLICAS)
    apart = {
        "num_attention_heads": copies,
        "num_key_value_heads": copies,
        "moe_intermediate_size": number_of(given, EXPERT_GROUPS),
    }
    heads = config.get("num_attention_heads", 0)
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config.get("intermediate_size") or 0,
        "moe_intermediate_size": config.get("moe_intermediate_size") or 0,
    }
    for name, count in counts.items():
        ranks = max(1, n_gpus // stages // apart.get(name, 1))
        can_be_copied = name == "num_key_value_heads" and not on_cpu and count and ranks % count == 0
        if count % ranks and not can_be_copied:
            what = f"{ranks}, between which {name} {count} cannot be divided"
            yield Problem(where, what, "another number, 1 for example", hint)
