"""Checks of models: that those to be served exist, that those asked for are served, and that images have a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_core.config.derive import is_local, sends_images
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.plugins.own_name import means
from slime_core.rundir.served_models import wanted_models
from slime_models.hf.config import read_config

from slime_sglang.checks.disaggregation import disaggregated_topology
from slime_sglang.checks.router import router_setting
from slime_sglang.settings.dividing import rank_problems
from slime_sglang.settings.section import OURS, FleetSection, SglangSection, pipeline_stages
from slime_sglang.settings.topology import serving_topology

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext


def model_problems(build: BuildContext) -> Iterator[Problem]:
    """Refuse models that are not there, or that their engines' ranks cannot share."""
    from slime_core.run.build import resolve_model  # imports numpy, and the next torch

    from slime_sglang.server.command import visible_device

    fleet = build.section(FleetSection)
    topology = serving_topology(build.settings)
    # Elsewhere than here there may be GPUs; the server itself refuses what a machine without them cannot do.
    on_cpu = is_local(build.settings.run) and visible_device() == "cpu"
    if fleet.rollout_external_engine_addrs:
        return
    for number, model in enumerate(topology.models):
        where = f"{fleet.sglang_config}: sglang.{number}.model_path"
        is_own = model.model_path is None or topology.is_policy(model)
        try:
            path = build.model_path if is_own else resolve_model(str(model.model_path), build.registry)
        except ConfigError as error:
            yield from (replace(problem, where=where) for problem in error.problems)
            continue
        except DataError as error:
            yield Problem(where, repr(model.model_path), "a model that is there", str(error))
            continue
        given = build.section(SglangSection).server_args
        if any(
            placement.num_gpus > 1 or pipeline_stages({**given, **placement.overrides}) > 1
            for placement in topology.placements(model)
        ):
            yield from rank_problems(topology, model, read_config(path), on_cpu=on_cpu, server_args=given)
            if on_cpu and topology.is_policy(model) and build.section(SglangSection).model_path is not None:
                yield Problem(
                    "sglang.model_path",
                    f"it with several GPUs an engine of {model.name!r}",
                    "engines of one GPU",
                    "which part of quantised weights a rank holds is not proven",
                )


def served_name_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse `served:NAME` of a model that the run does not serve."""
    asked = wanted_models(settings)
    if not asked:
        return
    try:
        topology = serving_topology(settings)
    except ConfigError:  # which another check reports
        return
    is_served = means(settings.rollout.rollout_engine, OURS)
    known = [model.name for model in topology.others] if is_served else []
    for where, name in asked:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        wanted = f"served:{near[0]}" if near else " or ".join(f"served:{each}" for each in known)
        yield Problem(
            where,
            f"served:{name}, which the run does not serve",
            wanted or "the address of a server",
            "" if known else "models of the run are in --sglang-config, with --rollout-engine sglang",
        )


def image_problems(build: BuildContext) -> Iterator[Problem]:
    """Refuse a model that sees no images, and a router, where prompts have some."""
    if not sends_images(build.settings):
        return
    from slime_sglang.generation.images import PLACEHOLDER

    if read_config(build.model_path).get(PLACEHOLDER) is None:
        yield Problem(
            "model.hf_checkpoint",
            f"{build.model_path}, whose config.json has no {PLACEHOLDER}, with data.multimodal_keys",
            "a model that sees images",
        )
    fleet = build.section(FleetSection)
    if fleet.has_router:
        yield Problem(
            router_setting(fleet),
            "it with data.multimodal_keys",
            "no router",
            "that sglang-router passes images on is not proven; without it requests are balanced all the same",
        )
    if disaggregated_topology(build.settings) is not None:
        yield Problem(
            "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config),
            "prefill and decode engines with data.multimodal_keys",
            "regular engines",
            "that both engines take the same images is not proven",
        )
