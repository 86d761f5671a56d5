"""Checks of engines with pipeline stages (`--sglang-pp-size`): what does not work with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem

from slime_sglang.settings.section import ROUTED_EXPERTS, FleetSection, SglangSection, pipeline_stages
from slime_sglang.settings.topology import ServedModel, ServingTopology, serving_topology

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext


def stage_problems(build: BuildContext) -> Iterator[Problem]:
    """Refuse pipeline stages of engines that only prefill or only decode, and of those that must say each token's experts."""
    settings, fleet = build.settings, build.section(FleetSection)
    if fleet.rollout_external_engine_addrs:
        return
    try:
        topology = serving_topology(settings)
    except ConfigError:  # which another check reports
        return
    for model in topology.models:
        stages = _most_stages(settings, topology, model)
        if stages == 1:
            continue
        where = f"pp_size of an engine of {model.name!r}"
        if topology.is_disaggregated(model):
            found = f"{stages} with prefill and decode engines"
            yield Problem(
                where, found, "1, or regular engines", "that their stages find one another is not proven"
            )
        if ROUTED_EXPERTS in build.engine_needs and topology.is_policy(model):
            found = f"{stages} in a run that needs the experts of each token"
            yield Problem(where, found, "1", "SGLang reports those of one stage's layers")


def _most_stages(settings: Settings, topology: ServingTopology, model: ServedModel) -> int:
    """Return the pipeline stages of the model's engine that has most."""
    common = settings.section(SglangSection).server_args
    return max(
        (pipeline_stages({**common, **placement.overrides}) for placement in topology.placements(model)),
        default=1,
    )
